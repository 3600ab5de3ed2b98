"""What ``paraft.init`` makes of its surroundings."""

from __future__ import annotations

import logging

import pytest

import paraft

SLURM = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}


@pytest.mark.parametrize(
    ("more", "options", "waits"),
    [
        ({}, {}, True),
        ({"SLURM_STEP_ID": "4294967291"}, {}, True),  # the batch script
        ({"SLURM_STEP_ID": "0"}, {}, False),
        ({}, {"workers": 4}, False),
        ({"PARAFT_WORKERS": "4"}, {}, False),
        ({"SLURM_NTASKS": "1"}, {}, False),
    ],
)
def test_init_in_no_step_of_srun_says_for_whom_it_waits(
    more: dict[str, str], options: dict[str, int], waits: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("PARAFT_WORKERS", "WORLD_SIZE", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (SLURM | more).items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.WARNING, "paraft"):
        paraft.init(servers="127.0.0.1:1", **options)
    said = " ".join(r.getMessage() for r in caplog.records)
    assert ("waits for 4 workers" in said and "srun" in said) == waits, said


def test_init_address_without_brackets_gets_a_hint() -> None:
    with pytest.raises(paraft.ConfigError, match=r"brackets, \[::1\]:7071"):
        paraft.init(servers="::1:7071")
