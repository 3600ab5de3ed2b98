"""Errors, in classes by what the user can do."""

from __future__ import annotations


class ParaftError(Exception):
    """Training cannot continue. The subclasses say what can be done about it.

    ``exit_code`` is the process's exit code that launchers and schedulers know (docs/configuration.md): a script that lets the error
    end it exits with it under ``paraft launch``.
    """

    exit_code: int = 1
    #: Another process is connected as this worker.
    rank_taken: bool = False


class UnavailableError(ParaftError, ConnectionError):
    """The servers cannot be reached, or a majority of them has lost the job's state: try later, or resume from a checkpoint."""

    exit_code = 69


class VersionTimeoutError(UnavailableError, TimeoutError):
    """No version of the weights came in time: the job has not reached it, or has ended, or the servers do not answer."""


class VersionNotKeptError(UnavailableError):
    """The job has passed the version, and no reader had it: ask for the newest, or ask before it is reached."""


class JobEndedError(ParaftError, RuntimeError):
    """The job has ended before the version: there will be none. Its last version can be read."""

    exit_code = 78


class OtherFoundingError(ParaftError, RuntimeError):
    """The job was started again under its name since the reader was opened: its versions are other weights. Open a new reader."""

    exit_code = 78


class ConfigError(ParaftError, ValueError):
    """The settings, the optimizer or the model do not fit the job or the servers: fix what the message names."""

    exit_code = 78


class MisuseError(ParaftError, RuntimeError):
    """A call that is not possible now: the message says what to call instead. The run continues."""

    exit_code = 78


class DataError(ParaftError, ValueError):
    """A model file or a checkpoint is missing, damaged, or of another job."""

    exit_code = 65


class RecordError(ParaftError, OSError):
    """A file of the run cannot be written: free space, or change permissions."""

    exit_code = 74


class DivergedError(ParaftError, ArithmeticError):
    """A gradient or a loss is not a finite number: lower the rate, clip (``clip_norm=``), or use a ``GradScaler``."""
