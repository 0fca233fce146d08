"""How many steps go to the devices in one dispatch."""

from typing import Any

import jax

from cyxjax.core.exact.calls import is_slow_in_loops
from cyxjax.core.exchange import equations
from cyxjax.core.mesh import num_replicas
from cyxjax.core.rows import whole_batch
from cyxjax.core.step import TrainState
from cyxjax.core.trees import batch_shapes
from cyxjax.data.sources import ArrayDataset
from cyxjax.train.plan import Plan
from cyxjax.train.program import Program
from cyxjax.train.start.dispatch import has_whole_batch

_FLOP_AT_ONCE, _MOST_STEPS = 1e9, 16  # per dispatch: some 10 ms on two cores


def steps_at_once(plan: Plan, program: Program, state: TrainState) -> int:
    """The most steps per dispatch, as even over an epoch as possible. More than one only for arrays: other
    data may give batches of different shapes, or take long to read.

    auto: several if steps are short, judged by their operations, which are the same on all ranks; one on
    devices other than CPUs, where several were not measured.
    """
    course, num_steps = plan.settings.course, plan.feed.steps_per_epoch
    is_read_together = isinstance(plan.data.train, ArrayDataset) and program.train_steps is not None
    if not is_read_together or num_steps is None:
        return 1
    if isinstance(course.steps_per_dispatch, int):
        most = course.steps_per_dispatch
    elif num_steps == 1 or plan.group.mesh.devices.flat[0].platform != "cpu":
        most = 1
    else:
        most = min(2 * course.in_flight, _most_at_once(plan, program, state))
    return -(-num_steps // -(-num_steps // most))


def _most_at_once(plan: Plan, program: Program, state: TrainState) -> int:
    """The limit from the model, traced on one sample per replica: 1 for a model with loops, whose operations
    XLA counts once, or with operations that are slow in the loop over steps.
    """
    step, mesh = plan.settings.step, plan.group.mesh
    inputs = batch_shapes(plan.inputs, num_replicas(mesh))
    with whole_batch(has_whole_batch(step, mesh)):
        forward: Any = program.predict_step.trace(jax.eval_shape(program.consensus, state), inputs)
    operations = list(equations(forward.jaxpr.jaxpr))
    if any(eqn.primitive.name in ("scan", "while") or is_slow_in_loops(eqn) for eqn in operations):
        return 1
    cost = forward.lower().cost_analysis() or {}
    rows = step.batch.batch_size * step.batch.accumulation
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    # The backward pass has two products for each forward one; update and exchange take some 20 per parameter.
    flop = cost.get("flops", _FLOP_AT_ONCE) * 3 * rows + 20 * num_parameters
    return max(1, min(_MOST_STEPS, int(_FLOP_AT_ONCE / flop)))
