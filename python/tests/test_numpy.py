"""paraft.numpy: plain arrays and JAX's in a job."""

import dataclasses
import importlib.util
from collections import namedtuple
from pathlib import Path

import pytest

import paraft
import paraft.numpy

np = pytest.importorskip("numpy")
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
needs_jax = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX is not installed")


def a_nest():
    rng = np.random.default_rng(3)
    return {"layers": [{"w": rng.normal(size=(5, 4)).astype("f4"), "b": np.zeros(4, "f4")}, (np.ones((4, 2), "f4"), None)], "a": np.full((), 2, "f4")}


def a_nests_gradient(params, step, rank=0):
    rng = np.random.default_rng(100 * step + rank)
    like = lambda a: (rng.normal(size=a.shape) + 0.1 * a).astype("f4")  # noqa: E731
    a, one, two = params["a"], params["layers"][0], params["layers"][1]
    return {"a": like(a), "layers": [{"b": like(one["b"]), "w": like(one["w"])}, (like(two[0]), None)]}


def leaves(params):
    one, two = params["layers"]
    return [params["a"], one["b"], one["w"], two[0]]


def by_hand(params, workers, steps, lr=0.1, momentum=0.9):
    """SGD with momentum on the mean of the workers' gradients; one rate, or each step's."""
    rates = np.broadcast_to(lr, steps)
    weights = [np.array(w, "f8") for w in leaves(params)]
    speed = [np.zeros_like(w) for w in weights]
    for step in range(steps):
        a, b, w, last = weights
        now = {"a": a, "layers": [{"w": w, "b": b}, (last, None)]}
        all_ = [leaves(a_nests_gradient(now, step, rank)) for rank in range(workers)]
        for i, grads in enumerate(zip(*all_)):
            speed[i] = momentum * speed[i] + np.mean(grads, 0, dtype="f8")
            weights[i] = weights[i] - rates[step] * speed[i]
    return weights


def job(steps):
    run = paraft.init()
    trainer = paraft.numpy.prepare(run, a_nest(), {"kind": "momentum", "lr": 0.1, "momentum": 0.9})
    for step in range(steps):
        trainer.step(a_nests_gradient(trainer.params, step, run.rank))
    run.finish()
    return [w.tolist() for w in leaves(trainer.params)]


def test_two_workers_do_what_the_formula_says(fleet, run_workers):
    one, other = run_workers(fleet, job, 2, 25).values
    assert one == other
    for got, should in zip(one, by_hand(a_nest(), 2, 25)):
        np.testing.assert_allclose(got, should, rtol=0, atol=2e-6)


def falls(step):
    return 0.1 / (1 + step)


def job_with_a_rate(steps):
    """By a callable, then by a number that the loop sets."""
    run = paraft.init()
    trainer = paraft.numpy.prepare(run, a_nest(), {"kind": "momentum", "lr": 0.5, "momentum": 0.9}, rate=falls)
    for step in range(steps):
        if step >= 10:
            trainer.rate = 0.02 if step < 15 else None
        trainer.step(a_nests_gradient(trainer.params, step, run.rank))
    run.finish()
    return [w.tolist() for w in leaves(trainer.params)]


def test_a_rate_that_changes_with_each_step_is_the_formulas(fleet, run_workers):
    one, other = run_workers(fleet, job_with_a_rate, 2, 18).values
    assert one == other
    rates = [falls(step) for step in range(10)] + [0.02] * 5 + [0.5] * 3
    for got, should in zip(one, by_hand(a_nest(), 2, 18, lr=rates)):
        np.testing.assert_allclose(got, should, rtol=0, atol=2e-6)


def test_a_rate_that_is_no_rate_is_refused_and_the_run_goes_on(fleet):
    run = paraft.init(fleet)
    trainer = paraft.numpy.prepare(run, a_nest(), {"kind": "sgd", "lr": 0.5}, rate=lambda step: float("nan") if step else 0.5)
    trainer.step(a_nests_gradient(trainer.params, 0))
    with pytest.raises(paraft.MisuseError, match="rate of step 1 is nan"):
        trainer.step(a_nests_gradient(trainer.params, 1))
    trainer.rate = -1.0
    with pytest.raises(paraft.MisuseError, match="-1.0"):
        trainer.step(a_nests_gradient(trainer.params, 1))
    trainer.rate = None
    trainer.step(a_nests_gradient(trainer.params, 1))
    assert run.step == 2
    run.finish()


def test_params_are_views_that_nobody_can_write(fleet):
    run = paraft.init(fleet)
    nest = a_nest()
    trainer = paraft.numpy.prepare(run, nest, {"kind": "sgd", "lr": 0.5})
    first = trainer.params["layers"][0]["w"]
    assert (first == nest["layers"][0]["w"]).all() and isinstance(trainer.params["layers"][1], tuple)
    with pytest.raises(ValueError, match="read-only"):
        first[:] = 0
    grads = a_nests_gradient(trainer.params, 0)
    after = trainer.step(grads)
    assert after is trainer.params and list(after) == list(nest)
    np.testing.assert_allclose(first, nest["layers"][0]["w"] - 0.5 * grads["layers"][0]["w"], atol=1e-6)
    run.finish()


def test_clips_by_the_norm_of_the_whole_gradient(fleet):
    run = paraft.init(fleet)
    trainer = paraft.numpy.prepare(run, [np.zeros(3, "f4"), np.zeros(1, "f4")], {"kind": "sgd", "lr": 1.0}, clip_norm=1.0)
    # Doubles travel as float32.
    a, b = trainer.step([np.array([3.0, 0.0, 0.0]), np.array([4.0])])
    np.testing.assert_allclose([a[0], b[0]], [-0.6, -0.8], atol=1e-6)
    run.finish()


def test_what_is_wrong_is_said_and_the_run_goes_on(fleet):
    run = paraft.init(fleet)
    for params, why in [
        ({}, "no array"),
        ({"w": np.zeros(2)}, r"`w` is float64.*astype"),
        ({"w": [1.0]}, r"`w\.0` is float"),
        ({"w": np.zeros((0, 2), "f4")}, "no values"),
        ({"w": np.zeros(2, "f4"), 1: np.zeros(2, "f4")}, "of one kind"),
        ({"a.b": np.zeros(2, "f4"), "a": {"b": np.zeros(2, "f4")}}, r"two arrays are named `a\.b`"),
    ]:
        with pytest.raises(paraft.ConfigError, match=why):
            paraft.numpy.prepare(run, params, {"kind": "sgd", "lr": 1.0})
    trainer = paraft.numpy.prepare(run, {"w": np.zeros((2, 3), "f4"), "b": np.zeros(3, "f4")}, {"kind": "sgd", "lr": 1.0})
    good = {"w": np.ones((2, 3), "f4"), "b": np.ones(3, "f4")}
    for grads, why in [
        ({"w": good["w"]}, "`b` is in one"),
        ({**good, "c": good["b"]}, "`c` is in one"),
        ([good["w"], good["b"]], "is in one"),
        ({**good, "w": good["w"].T}, r"`w` has shape \(3, 2\)"),
        ({**good, "b": np.ones(3, int)}, "`b` is int64"),
        ({**good, "b": np.ones(3, complex)}, "`b` is complex128"),
    ]:
        with pytest.raises(paraft.MisuseError, match=why):
            trainer.step(grads)
    with pytest.raises(paraft.MisuseError, match="has its model already"):
        paraft.numpy.prepare(run, {"w": np.zeros(2, "f4")})
    # Memory in another order is no mistake.
    w, b = np.arange(6.0, dtype="f4").reshape(2, 3), np.arange(3.0, dtype="f4")
    trainer.step({"w": np.asfortranarray(w), "b": b[::-1]})
    assert run.step == 1 and (trainer.params["w"] == -w).all() and (trainer.params["b"] == -b[::-1]).all()
    run.finish()


def test_a_nest_is_built_again_as_it_was():
    Pair = namedtuple("Pair", "x y")
    nest = {"z": Pair(1, [2, 3]), "a": {"n": (4, None)}}
    found, rebuild = paraft.numpy._flat(nest)
    assert found == [("a.n.0", 4), ("z.x", 1), ("z.y.0", 2), ("z.y.1", 3)]
    again = rebuild(iter([40, 10, 20, 30]))
    assert again == {"z": Pair(10, [20, 30]), "a": {"n": (40, None)}} and list(again) == ["z", "a"]


def jax_job():
    """What JAX has computed from weights stays what they were, however late it reads them."""
    import jax
    import jax.numpy as jnp

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Layer:
        w: jax.Array
        b: jax.Array

    run = paraft.init()
    params = {"one": Layer(jnp.ones((64, 64)), jnp.zeros(16)), "two": jnp.ones(4, jnp.float32)}
    empty = np.empty

    def aligned(n, dtype):
        """Memory that JAX, given views of it, would take as it is."""
        memory = empty(4 * n + 64, "u1")
        at = -memory.ctypes.data % 64
        return memory[at : at + 4 * n].view(dtype)

    np.empty = aligned
    trainer = paraft.numpy.prepare(run, params, {"kind": "sgd", "lr": 1.0})
    np.empty = empty
    slow = jax.jit(lambda p: (jnp.linalg.matrix_power(jnp.eye(500), 64) * p["one"].w[0, 0])[0, 0])
    ones = jax.tree.map(jnp.ones_like, params)
    slow(params)
    later, kept = [], []
    for _ in range(10):
        later.append(slow(trainer.params))
        kept.append(trainer.params)
        trainer.step(ones)
    run.finish()
    last = trainer.params
    assert isinstance(last["one"], Layer) and isinstance(last["two"], jax.Array)
    names = [name for name, _ in paraft.numpy._flat(params)[0]]
    return [float(x) for x in later], [float(p["one"].w[3, 3]) for p in kept], float(last["two"][0]), names


@needs_jax
def test_jax_has_arrays_that_do_not_change(fleet, run_workers):
    ((later, kept, last, names),) = run_workers(fleet, jax_job, 1, timeout=240, env={"JAX_PLATFORMS": "cpu"}).values
    should = [1.0 - i for i in range(10)]
    assert later == should and kept == should and last == -9.0
    assert names == ["one.w", "one.b", "two"]


@pytest.mark.parametrize("example", ["numpy_digits.py", pytest.param("jax_mlp.py", marks=needs_jax)])
def test_examples(fleet, run_workers, example):
    first, _ = run_workers(fleet, EXAMPLES / example, 2, timeout=180, env={"JAX_PLATFORMS": "cpu"})
    assert float(first.out.split()[-1]) > 0.9


def trains_rows(steps):
    """Moves rows and a weight; the ids of a step differ between workers, and one comes twice."""
    run = paraft.init()
    users = paraft.numpy.Table("users", 2, max_rows=100, optimizer={"kind": "sgd", "lr": 0.5}, init={"kind": "normal", "std": 0.1})
    trainer = paraft.numpy.prepare(run, {"b": np.zeros(1, "f4")}, {"kind": "sgd", "lr": 1.0}, tables=[users])
    ids = [[run.rank, 2**40], [5, 5]]
    first = users.rows([0, 1, 2**40, 5, 9]).tolist()
    for step in range(steps):
        rows = users.rows(ids)
        assert rows.shape == (2, 2, 2) and (rows[1, 0] == rows[1, 1]).all()
        users.lr = 0.25 if step else None
        users.prefetch([5, 9])
        trainer.step({"b": np.ones(1, "f4")}, {users: (np.array(ids), rows)})
    last = users.rows([0, 1, 2**40, 5, 9]).tolist()
    run.finish()
    with pytest.raises(paraft.MisuseError, match="of a run that is over"):
        users.rows([0])
    return first, last


def test_rows_of_a_table_train_beside_the_weights(fleet, run_workers):
    one, other = run_workers(fleet, trains_rows, 2, 3).values
    assert one == other
    first, last = (np.array(rows) for rows in one)
    # A row's gradient is itself, of one worker or both, once or twice; lock-step takes the mean of the two workers.
    parts = np.array([0.5, 0.5, 1.0, 2.0, 0.0])
    should = first * (np.prod([1 - lr * parts for lr in (0.5, 0.25, 0.25)], 0))[:, None]
    np.testing.assert_allclose(last, should, atol=1e-7)


def test_wrong_ids_and_gradients_of_rows_are_said(fleet):
    run = paraft.init(fleet)
    of = {"max_rows": 100, "optimizer": {"kind": "sgd", "lr": 1.0}, "init": {"kind": "zeros"}}
    table, stranger = paraft.numpy.Table("t", 2, **of), paraft.numpy.Table("t", 2, **of)
    with pytest.raises(paraft.MisuseError, match="`t` is in no run"):
        table.rows([1])
    with pytest.raises(paraft.ConfigError, match="two tables are named `t`"):
        paraft.numpy.prepare(run, [np.zeros(1, "f4")], {"kind": "sgd", "lr": 1.0}, tables=[table, stranger])
    trainer = paraft.numpy.prepare(run, [np.zeros(1, "f4")], {"kind": "sgd", "lr": 1.0}, tables=[table])
    grads, ones = [np.ones(1, "f4")], np.ones((1, 2))
    for rows, why in [
        ({stranger: ([1], ones)}, r"Table\('t', 2\) is none of this run's tables"),
        ({table: ([1, 2], ones)}, r"have shape \(1, 2\); for these ids it is \(2, 2\)"),
        ({table: ([-1], ones)}, "ids are 0 to"),
        ({table: ([1.0], ones)}, "`t` are float64: they are whole numbers"),
        ({table: (np.array([2**63], "u8"), ones)}, "ids are 0 to"),
        ({table: ([1], ones.astype(int))}, "of table `t`'s rows is int64"),
    ]:
        with pytest.raises(paraft.MisuseError, match=why):
            trainer.step(grads, rows)
    trainer.step(grads, {table: ([1], ones)})
    assert run.step == 1 and (table.rows([1, 2]) == [[-1, -1], [0, 0]]).all()
    run.finish()
