"""A run beside the code that trains on it: real streams and records, in a kernel of Jupyter's and without one."""

from __future__ import annotations

import html.parser
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest

import paraft  # noqa: I001
import paraft.notebook
from conftest import import_path
from paraft import _figure, _live
from paraft._fleet import program

JOB = """
name = "digits-b"
seed = 1
[model]
kind = "mlp"
hidden = [16]
[data]
kind = "digits"
[train]
workers = 2
epochs = 1_000_000
device = "cpu"
[optimizer]
kind = "sgd"
[cluster]
servers = 3
replicas = 3
"""


class Training:
    """`paraft train` as a process, with the address of its page."""

    def __init__(self, folder: Path, *settings: str) -> None:
        (folder / "job.toml").write_text(JOB)
        self.run = folder / "run"
        self.out = folder / "out"
        command = [program(), "train", "job.toml", "--run-dir", "run", *(word for s in settings for word in ("--set", s))]
        with open(self.out, "wb") as out:
            self.process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)

    @property
    def address(self) -> str:
        """As it is printed."""
        wait("the page's address", lambda: "#token=" in self.out.read_text())
        return re.findall(r"http\S+#token=\w+", self.out.read_text())[0]  # type: ignore[no-any-return]

    def trains(self) -> Training:
        record = self.run / "metrics.jsonl"
        wait("it trains", lambda: record.exists() and '"eval"' in record.read_text())
        return self

    def server(self, port: str) -> int:
        """The process that listens at this port."""
        sockets = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        listens = {f"socket:[{s[9]}]" for s in sockets if s[1].endswith(f":{int(port):04X}") and s[3] == "0A"}
        for process in Path("/proc").iterdir():
            if process.name.isdecimal():
                try:
                    if {os.readlink(f) for f in (process / "fd").iterdir()} & listens:
                        return int(process.name)
                except OSError:
                    continue
        pytest.fail(f"nobody listens at {port}")

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., Training]]:
    started: list[Training] = []

    def begin(*settings: str) -> Training:
        started.append(Training(tmp_path, *settings))
        return started[-1]

    yield begin
    for training in started:
        training.end()


def wait(what: str, is_so: Callable[[], Any], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < until, f"not in {seconds:g} s: {what}"
        time.sleep(0.02)


class Reader(html.parser.HTMLParser):
    """The tags of a piece of HTML, each closed as it must be, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.said = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[Any]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[Any]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.said += data + " "

    def charts(self) -> dict[str, str]:
        """What each says of itself: its title, and its latest values."""
        labels = [attrs["aria-label"] for tag, attrs in self.tags if tag == "svg"]
        return dict(label.split(": ", 1) for label in labels)


def test_a_page_is_followed_until_the_run_has_ended(train: Any, capsys: Any) -> None:
    training = train()
    watch = paraft.notebook.watch(training.address)
    assert watch.widget is None
    wait("loss, accuracy and rates have come", lambda: re.search(r"loss [\d.]+ .*held-out [\d.]+, [\d.]+ %  [\d.]+k? samples/s", watch.text))
    assert f"live, from {training.address[7:].split('/')[0]}" in watch.text
    assert "leads the control group" in watch.text and "digits-b running" in watch.text
    page = Reader(watch.html)
    assert list(page.charts()) == ["Loss", "Held-out accuracy", "Samples a second"]
    assert "training" in page.charts()["Loss"] and "%" in page.charts()["Held-out accuracy"]
    assert "digits-b" in page.said
    # Its exit code is no matter: the fleet may be gone before it could ask whether the job has ended.
    subprocess.run([program(), "stop", "digits-b", "--fleet", str(training.run)], capture_output=True, timeout=60)
    assert training.process.wait(60) == 0
    assert watch.wait(30), watch.text
    assert re.search(r"digits-b was (running|stopping|stopped|finished) .*nobody answers at .* any more", watch.text)
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == watch.text and len(printed) > 1


def test_it_goes_on_with_another_servers_page(train: Any) -> None:
    training = train().trains()
    address = training.address
    watch = paraft.notebook.watch(address)
    first = address[7:].split("/")[0]
    wait("the others' pages are known", lambda: watch._seen.jobs and all(s["page"] for s in watch._source._facts["servers"]))  # type: ignore[attr-defined]
    os.kill(training.server(first.rpartition(":")[2]), signal.SIGKILL)

    def step() -> int:
        jobs = watch._seen.jobs
        return jobs[0].step if jobs else 0

    # Its first values may be from before the job's start, because nothing had read them yet.
    wait("another's page", lambda: "live, from" in watch.text and first not in watch.text and step())
    before = step()
    wait("training goes on", lambda: step() > before)
    # The whole fleet dies; the display shows no invented values.
    training.process.kill()
    wait("its end is shown", lambda: "does not answer" in watch.text)
    assert Reader(watch.html).said.count("does not answer") == 1
    watch.close()
    assert watch.wait(30)


def test_a_folder_is_followed_from_before_its_record_begins(train: Any, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    watch = paraft.notebook.watch(tmp_path / "run")
    wait("it waits", lambda: "has no metrics.jsonl yet" in watch.text)
    training = train("train.epochs=20")
    # It may have ended by the next read.
    wait("it trains", lambda: "running" in watch.text or "finished" in watch.text)
    assert watch.wait(60), watch.text
    record = [json.loads(line) for line in (training.run / "metrics.jsonl").read_text().splitlines()]
    final = record[-1]
    assert "digits-b finished" in watch.text and "0 of 2 workers" in watch.text
    assert f"{_figure.number(final['final_loss'])}, {_figure.percent(final['final_accuracy'])}" in watch.text
    led = [f"s{e['server']} leads" for e in record if e["event"] == "shard"]
    assert led and all(who in watch.text for who in led)
    evaluated = {e["epoch"]: e for e in record if e["event"] == "eval"}
    curve = watch._seen.jobs[0].curve
    assert [y for _, y in curve("accuracy")] == [e["accuracy"] for e in evaluated.values()]
    assert all(b >= a for (a, _), (b, _) in zip(curve("loss"), curve("loss")[1:]))
    # A finished run can be displayed too.
    again = paraft.notebook.watch(str(tmp_path / "run"))
    assert again.wait(30) and again.text == watch.text


def test_who_is_not_let_in_is_told(train: Any, tmp_path: Path) -> None:
    address = train().address
    watch = paraft.notebook.watch(re.sub("token=.*", "token=0123456789abcdef", address))
    assert watch.wait(30) and "does not let us in" in watch.text
    for target, kind, said in [
        (address.split("#")[0], paraft.ConfigError, "no token"),
        ("http://", paraft.ConfigError, "no page's address"),
        (tmp_path / "nowhere", paraft.DataError, "no such folder"),
    ]:
        with pytest.raises(kind, match=said):
            paraft.notebook.watch(target)


def test_what_was_watched_before_is_replaced(tmp_path: Path) -> None:
    first, second = (paraft.notebook.watch(tmp_path) for _ in range(2))
    assert first.wait(10) and not second.wait(0)
    second.close()
    assert second.wait(10)


@pytest.fixture
def kernel(train: Any) -> Iterator[Any]:
    """``kernel(code, until)`` runs a cell in a kernel of Jupyter's, and gives its messages until one satisfies ``until``."""
    jupyter = pytest.importorskip("jupyter_client")
    pytest.importorskip("ipykernel")
    manager, client = jupyter.manager.start_new_kernel(kernel_name="python3", env={**os.environ, "PYTHONPATH": import_path()})

    def cell(code: str, until: Callable[[str, Any], Any]) -> list[tuple[str, Any]]:
        client.execute(code)
        said: list[tuple[str, Any]] = []
        end = time.monotonic() + 60
        while time.monotonic() < end:
            message = client.get_iopub_msg(timeout=60)
            said.append((message["msg_type"], message["content"]))
            assert message["msg_type"] != "error", "\n".join(message["content"]["traceback"])
            if until(*said[-1]):
                return said
        pytest.fail(f"it did not come: {said}")

    yield cell
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def test_in_a_notebook_it_is_a_widget_whose_traits_go_on(kernel: Any, train: Any) -> None:
    pytest.importorskip("anywidget")
    training = train().trains()

    def trait(name: str) -> Callable[[str, Any], bool]:
        return lambda kind, content: kind == "comm_msg" and name in content["data"].get("state", {})

    accuracy = lambda kind, content: trait("values")(kind, content) and content["data"]["state"]["values"]["accuracy"]  # noqa: E731
    view = "application/vnd.jupyter.widget-view+json"
    shown = lambda kind, content: kind == "display_data" and view in content["data"]  # noqa: E731
    said = kernel(f"import paraft.notebook\nw = paraft.notebook.watch({training.address!r})\nw", shown)
    opened = [c["data"]["state"] for k, c in said if k == "comm_open"]
    assert any("render({ model, el })" in state.get("_esm", "") for state in opened)
    said = kernel("pass", accuracy)
    values = said[-1][1]["data"]["state"]["values"]
    assert values["state"] == "running" and values["workers"] == 2 and values["step"] > 0
    # While the kernel computes too: the cell's end is not what sends them.
    said = kernel("import time; time.sleep(3); print('slept')", lambda kind, content: kind == "stream")
    figures = [c["data"]["state"]["figure"] for k, c in said if trait("figure")(k, c)]
    assert len(figures) >= 2 and len(set(figures)) == len(figures)
    assert "Loss" in Reader(figures[-1]).charts()
    # The browser chooses a job.
    said = kernel("w.widget.set_state({'job': 'no-such'})", lambda k, c: trait("figure")(k, c) and "no job no-such" in c["data"]["state"]["figure"])
    kernel("w.widget.set_state({'job': 'digits-b'})", lambda k, c: trait("figure")(k, c) and "<svg" in c["data"]["state"]["figure"])


def test_without_anywidget_it_is_a_figure_that_is_drawn_anew(kernel: Any, train: Any) -> None:
    training = train().trains()
    code = f"import sys; sys.modules['anywidget'] = None\nimport paraft.notebook\nparaft.notebook.watch({str(training.run)!r})"
    said = kernel(code, lambda kind, content: kind == "update_display_data" and "Held-out accuracy" in content["data"]["text/html"])
    first = next(c for k, c in said if k == "display_data")
    assert first["transient"]["display_id"] == said[-1][1]["transient"]["display_id"]
    assert list(Reader(said[-1][1]["data"]["text/html"]).charts()) == ["Loss", "Held-out accuracy", "Samples a second"]


def test_charts_have_round_ticks_and_bounded_points() -> None:
    assert _figure.ticks(0.0, 1.0) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert _figure.ticks(3, 3) == pytest.approx([2.6, 2.8, 3.0, 3.2, 3.4])
    for low, high in [(1e-9, 3e-9), (0.0, 12345.0), (-5.0, 0.1), (0.9123, 0.9127)]:
        t = _figure.ticks(low, high)
        assert t[0] <= low + 1e-12 and t[-1] >= high - 1e-12 * abs(high) and 2 <= len(t) <= 7
    points = [(float(i), 1.0 / (1 + i)) for i in range(5000)]
    drawn = _figure.chart("Loss", [("x", "red", points)])
    assert drawn.count("L") < 300 and "NaN" not in drawn and len(drawn) < 8000
    assert "nothing yet" in _figure.chart("Loss", [("x", "red", [(0.0, float("nan"))])])
    assert "<circle" in _figure.chart("Loss", [("x", "red", [(0.0, 1.0)])])
    kept: list[Any] = []
    for i in range(10_000):
        kept.append(i)
        _live._thin(kept)
    assert len(kept) <= 1200 and (kept[0], kept[-1]) == (0, 9_999) and kept == sorted(kept)
