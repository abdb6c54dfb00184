"""How every parameter will be read, and what that costs: from a few samples, before anything is paid."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from featlearn.contraction.gram import Extent, Mode, Route, costs, window_cost
from featlearn.contraction.hardware import elementwise_cost
from featlearn.gradients.captured import Chunk
from featlearn.measurement import Measurement
from featlearn.ops import Outer
from featlearn.planning.plan import ParameterPlan


def parameter_plans(
    measurement: Measurement, mode: Mode, directions: int, samples: tuple[int, int], elementwise: Collection[str]
) -> tuple[ParameterPlan, ...]:
    """Plan how every parameter is read and contracted, from a few samples of every batch."""
    item, weight = measurement.dtype.itemsize, elementwise_cost(measurement.device)
    plans, captured = [], measurement.examples
    for name, parameter in measurement.parameters.items():
        size = parameter.numel() * (2 if parameter.is_complex() else 1)
        examples = [example for example in captured if name in example.uses]
        nodes = examples[0].uses[name].nodes if examples else ()
        plan = ParameterPlan(
            name=name,
            shape=tuple(parameter.shape),
            uses=nodes,
            # Others than these samples may use a parameter that is unused here, so it is captured all the same.
            route="unused",
            reason="no gradient reaches it from the few samples that were run",
            operations=0,
            kept=directions * size * item,
            passing=3 * directions * size * item,
            form_early=True,
        )
        if not examples:
            plans.append(plan)
            continue
        route, reason = _route(name, examples, name in elementwise)
        if route != "factors":
            operands = max(_operand_numbers(example, name) for example in examples) * directions * item
            dense = samples[0] * samples[1] * size * (directions**2 if mode == "full" else directions)
            plans.append(
                replace(plan, route=route, reason=reason, operations=dense, passing=3 * (plan.kept + operands))
            )
            continue
        extents = [
            _extent(example, name, count, directions, weight) for example, count in zip(examples, samples, strict=False)
        ]
        cost = costs(extents[0], extents[-1], mode, weight)
        best = min(cost, key=cost.__getitem__)
        factors = max(_factor_numbers(example, name, directions) for example in examples) * item
        early = best is Route.GRADIENTS and plan.kept < factors
        positions = max(sum(t for t, _, _ in extent.parts) for extent in extents)
        kept = plan.kept if early else factors
        plans.append(
            replace(
                plan,
                route=best.value,
                reason=f"{positions} position{'' if positions == 1 else 's'}",
                operations=cost[best],
                kept=kept,
                # Rows and gradients as the op has them, by sample, and once more while they are multiplied.
                passing=(4 * factors + kept) if early else 3 * factors,
                form_early=early,
                factors=factors // item,
                positions=positions,
            )
        )
    return tuple(plans)


def _route(name: str, examples: Sequence[Chunk], elementwise: bool) -> tuple[str, str]:
    for example in examples:
        uses = example.uses[name]
        if uses.fallback_reason is not None:
            return "fallback", uses.fallback_reason
    for example in examples:
        uses = example.uses[name]
        if uses.matrix_view is None:
            whole = all(reading.value[0] is example.graph.leaves[name] for reading in uses.readings)  # type: ignore[union-attr]
            return ("direct", "small operand") if whole else ("pulled back", "made by other ops")
    return ("direct", "a rate for every entry") if elementwise else ("factors", "")


def _operand_numbers(example: Chunk, name: str) -> int:
    """Numbers per sample while the gradients of a parameter's operands are formed, to be pulled back to it."""
    readings = example.uses[name].readings
    factors = [
        r.form.positions * r.form.blocks * (r.form.row_size + r.form.grad_size)
        for r in readings
        if isinstance(r.form, Outer) and not r.form.indexed
    ]
    # Every direction's gradient at every use is held until the operands' gradients are formed.
    held = sum(reading.use.output.numel() // reading.use.layout.samples for reading in readings)
    return sum(reading.use.shape.numel() for reading in readings) + sum(factors) + held


def _extent(example: Chunk, name: str, samples: int, directions: int, elementwise: float) -> Extent:
    uses = example.uses[name]
    where = uses.matrix_view
    assert where is not None
    sides: dict[tuple[bool, bool], tuple[int, int, int]] = {}
    for reading in uses.readings:
        form = reading.form
        assert isinstance(form, Outer)
        key = (form.rows_first != where.flipped[reading.value], form.indexed)
        before = sides.get(key, (0, 0, 0))[0]
        sides[key] = (before + form.positions, _row_cost(form, elementwise), form.grad_size)
    return Extent(samples, directions, where.blocks, where.first, where.second, tuple(sides.values()))


def _row_cost(form: Outer, elementwise: float) -> int:
    """Multiply-adds for the inner product of two rows."""
    if form.pixels:
        return window_cost(form.window, form.row_size, form.pixels, form.positions, elementwise)
    return 1 if form.indexed else form.row_size


def _factor_numbers(example: Chunk, name: str, directions: int) -> int:
    """Numbers kept per sample as factors: images, where the rows are their windows."""
    kept = written = 0
    for reading in example.uses[name].readings:
        form = reading.form
        assert isinstance(form, Outer)
        rows = form.positions if form.indexed else form.blocks * form.positions * form.row_size
        image = form.pixels * form.blocks * form.row_size // form.window
        grads = form.blocks * form.positions * directions * form.grad_size
        kept, written = kept + (image or rows) + grads, written + rows + grads
    # Several uses on one side are written out and joined.
    single = len(example.uses[name].readings) == 1
    return kept if single else written
