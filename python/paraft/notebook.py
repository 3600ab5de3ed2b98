"""Shows a fleet or a run beside the code that trains on it::

    import paraft.notebook

    paraft.notebook.watch("http://127.0.0.1:34051/#token=1f0c…")      # as `paraft train` prints it
    paraft.notebook.watch("runs/mnist-1")                             # a run's folder, also one that has ended

The kernel reads the data and passes it on: the browser need not reach the fleet.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import Any, Optional, Union

from . import _figure
from ._live import Seen, Source, source

__all__ = ["Watch", "watch"]

#: The minimum and maximum interval of text lines, if there are changes.
_LINE_SECONDS = 2.0

_ESM = """
export default { render({ model, el }) {
  const pick = document.createElement("select"), figure = document.createElement("div");
  pick.setAttribute("aria-label", "Job");
  el.append(pick, figure);
  const jobs = () => {
    const names = model.get("jobs"), option = (value, text) => { const o = document.createElement("option"); o.value = value; o.textContent = text; return o; };
    pick.replaceChildren(option("", "the latest job"), ...names.map((n) => option(n, n)));
    pick.value = names.includes(model.get("job")) ? model.get("job") : "";
    pick.hidden = names.length < 2;
  };
  // Made by this package's Python, which escapes what it has from elsewhere.
  const draw = () => { figure.innerHTML = model.get("figure"); };
  pick.onchange = () => { model.set("job", pick.value); model.save_changes(); };
  model.on("change:jobs", jobs);
  model.on("change:job", jobs);
  model.on("change:figure", draw);
  jobs();
  draw();
} };
"""


def watch(target: Union[str, os.PathLike[str]], job: Optional[str] = None) -> Watch:
    """Shows a fleet or a run while it trains: loss, held-out accuracy, samples per second, workers, leaders.

    As the last expression of a cell it is a widget if `anywidget <https://anywidget.dev>`_ is installed, otherwise a
    figure that is redrawn. Without a notebook it prints lines of text. All are updated in the background, while cells
    run. Watching a target again replaces its former display.

    Args:
        target: the page's address with its token, as printed by ``paraft train`` or a server; or a run's folder.
        job: the job to show, for a fleet with several. Default: the latest that trains.

    Raises:
        ConfigError: the address is invalid, or has no token.
        DataError: there is no such folder.
    """
    return Watch(os.fspath(target), job or "")


class Watch:
    """The display of :func:`watch`. It ends by itself with the run; :meth:`close` ends it earlier."""

    def __init__(self, target: str, job: str) -> None:
        self._source: Source = source(target)
        self._target = target
        self._job = job
        #: The source and the browser both change the display: one at a time.
        self._lock = threading.RLock()
        self._seen = Seen(where="nothing has come yet")
        self._notebook = _in_notebook()
        #: Figures of cells, without a widget.
        self._figures: list[Any] = []
        self._widget: Any = _widget(self) if self._notebook else None
        self._line, self._lined = "", 0.0
        with _WATCHED_LOCK:
            before = _WATCHED.pop(target, None)
            _WATCHED[target] = self
        if before is not None:
            before.close()
        self._thread = threading.Thread(target=self._follow, name="paraft-watch", daemon=True)
        self._thread.start()

    @property
    def widget(self) -> Any:
        """The widget, for your own layout; None without anywidget or a notebook. Its trait ``values`` has the
        numbers."""
        return self._widget

    @property
    def text(self) -> str:
        """The state as one line."""
        return _figure.text(self._seen, self._job)

    @property
    def html(self) -> str:
        """The state, with SVG charts."""
        return _figure.html(self._seen, self._job)

    def wait(self, timeout: Optional[float] = None) -> bool:
        """Waits until the end, at most ``timeout`` seconds; returns whether the end was reached."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Stops watching. The display stays."""
        self._source.stop()

    def _follow(self) -> None:
        try:
            self._source.run(self._show)
        finally:
            with _WATCHED_LOCK:
                if _WATCHED.get(self._target) is self:
                    del _WATCHED[self._target]

    def _show(self, seen: Seen) -> None:
        self._seen = seen
        self._renew()

    def _choose(self, job: str) -> None:
        self._job = job
        self._renew()

    def _renew(self) -> None:
        with self._lock:
            if self._widget is not None:
                self._widget.renew(self._seen, self._job)
            for figure in self._figures:
                figure.update(_html(self))
            now = time.monotonic()
            line = self.text
            if not self._notebook and line != self._line and (now - self._lined >= _LINE_SECONDS or self._seen.ended):
                self._line, self._lined = line, now
                with contextlib.suppress(OSError, ValueError):  # the output may be closed
                    print(line, file=sys.stdout, flush=True)

    def _ipython_display_(self) -> None:
        if self._widget is not None:
            _ipython().display(self._widget)
        elif self._notebook:
            with self._lock:
                self._figures.append(_ipython().display(_html(self), display_id=True))
        else:
            print(self.text)

    def __repr__(self) -> str:
        return f"<paraft.notebook.Watch: {self.text}>"


#: The active watches, by address or folder.
_WATCHED: dict[str, Watch] = {}
_WATCHED_LOCK = threading.Lock()


def _in_notebook() -> bool:
    """Whether this is a notebook kernel, which can display HTML."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")


def _ipython() -> Any:
    import IPython.display

    return IPython.display


def _html(watch: Watch) -> Any:
    return _ipython().HTML(watch.html)


def _widget(watch: Watch) -> Any:
    """A watch's widget; None without anywidget."""
    try:
        import anywidget
        import traitlets
    except ModuleNotFoundError:
        return None

    class Live(anywidget.AnyWidget):
        """The displayed values; ``job`` is the user's selection."""

        _esm = _ESM
        figure = traitlets.Unicode("").tag(sync=True)
        jobs = traitlets.List(traitlets.Unicode()).tag(sync=True)
        job = traitlets.Unicode("").tag(sync=True)
        #: ``loss``, ``held_out_loss``, ``accuracy``, ``samples_per_s``, ``step``, ``workers``, ``state``; None:
        #: unknown.
        values = traitlets.Dict().tag(sync=True)

        def renew(self, seen: Seen, chosen: str) -> None:
            self.jobs = list(dict.fromkeys(j.name for j in seen.jobs))
            job = seen.job(chosen)
            if job is not None:
                self.values = {
                    "state": job.state,
                    "step": job.step,
                    "workers": job.present,
                    "loss": job.loss,
                    "held_out_loss": job.held_out_loss,
                    "accuracy": job.accuracy,
                    "samples_per_s": job.samples_per_s,
                }
            self.figure = _figure.html(seen, chosen)

    widget = Live(job=watch._job)
    widget.observe(lambda change: watch._choose(change["new"]), names="job")
    return widget
