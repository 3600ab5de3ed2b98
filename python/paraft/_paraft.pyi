from typing import Any, Optional, final

__all__ = ["Run", "__version__", "end_with"]

__version__: str

def end_with(descriptor: int) -> None: ...

@final
class Run:
    def __new__(
        cls,
        *,
        job: Optional[str],
        set: list[str],
        rank: int,
        servers: list[str],
        tensors: list[tuple[str, list[int], bool]],
        groups: list[tuple[int, float, float]],
        samples: int,
        data: str,
        brings: bool,
        address: int,
        values: int,
        owner: Any,
        state: list[int] = ...,
        updates: int = 0,
        note: str = ...,
        run_dir: Optional[str] = None,
        resume: Optional[str] = None,
        metrics: Optional[str] = None,
        log_file: Optional[str] = None,
        trace: Optional[tuple[str, int]] = None,
        slow: float = 1.0,
        straggle: Optional[str] = None,
        certs: Optional[str] = None,
    ) -> Run: ...
    def ready(self, tensor: int, address: int) -> None: ...
    def step(self, gradients: list[tuple[int, int]], loss: float, samples: int) -> tuple[int, bool, bool]: ...
    def go_on(self) -> tuple[int, bool, bool]: ...
    def rates(self, rates: list[float]) -> None: ...
    def skip(self) -> None: ...
    def chunk(self) -> Optional[tuple[int, list[int]]]: ...
    def prepared(self) -> None: ...
    def report(self, epoch: int, loss_sum: float, correct: int, count: int) -> None: ...
    def save(self, folder: Optional[str] = None) -> str: ...
    def finish(self) -> None: ...
    def leave(self) -> None: ...
    def stands(self) -> dict[str, Any]: ...
