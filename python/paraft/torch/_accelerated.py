"""Accelerate's wrapper of an optimizer: what it keeps of it from before ``prepare()``, and how it notices a skipped step."""

from __future__ import annotations

from typing import Any

from .._run import Run


def follow(run: Run, wrapper: Any) -> None:
    """Makes a wrapper with a GradScaler use the optimizer's present ``step()``, not the one of when it was made.

    It takes a step for skipped if its scaler does not call ``step()``. Ours is called always, so that the servers hear of
    each step: it says whether the step was skipped, here or by another worker. Then the scheduler waits, as under DDP.
    """
    if getattr(wrapper, "scaler", None) is None or not hasattr(wrapper, "_optimizer_patched_step_method"):
        return
    inner = wrapper.optimizer
    step = inner.step
    # A fused optimizer's step() is called always, and Accelerate takes none for skipped.
    fused = any(group.get("fused") for group in inner.param_groups)

    def told(*args: Any, **kwargs: Any) -> Any:
        before, found = run.stats()["skipped"], getattr(inner, "found_inf", None)
        done = step(*args, **kwargs)
        skips = found is not None and float(found) != 0.0 or run.stats()["skipped"] > before
        wrapper._accelerate_step_called = fused or not skips
        return done

    wrapper._optimizer_original_step_method = step
    wrapper._optimizer_patched_step_method = told
