"""Checks that arguments, inputs, weights, outputs, and memory budgets agree on all ranks."""

import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from featlearn.distributed.group import Expectation, RankGroup, digest
from featlearn.errors import InputValueError
from featlearn.network.fingerprint import fingerprint
from featlearn.network.inputs import tensors_in

SAME_DATA = "pass all samples on every rank: they are divided internally, so do not use a DistributedSampler"


def same_arguments(arguments: Mapping[str, object]) -> Expectation:
    """Expect equal arguments of a call, compared as text."""

    def refuse(reports: list[dict[str, str]]) -> None:
        for name, rank, value in _differences(reports):
            raise InputValueError(
                f"{name} is {value} on rank {rank} and {reports[0].get(name)} on rank 0, expected the same call on "
                "every rank of the group"
            )

    return Expectation(lambda: {name: str(value) for name, value in arguments.items()}, refuse)


def same_call(arguments: Mapping[str, object], tensor_arguments: Mapping[str, Any]) -> tuple[Expectation, Expectation]:
    """Expect equal arguments and tensors of a call."""
    tensors = {
        f"{name}{f'[{index}]' if index else ''}": tensor
        for name, value in tensor_arguments.items()
        for index, tensor in enumerate(_tensors(value))
    }
    return same_arguments(arguments), same_tensors("the argument", tensors, SAME_DATA)


def _tensors(argument: Any) -> list[Tensor]:
    """Return the tensors in an argument, and the state of its random generator."""
    if isinstance(argument, torch.Generator):
        return [argument.get_state()]
    return tensors_in(argument) if not hasattr(argument, "generator") else _tensors(argument.generator)


def same_tensors(what: str, tensors: Mapping[str, Any], remedy: str) -> Expectation:
    """Expect equal tensors (shape, dtype, fingerprint) and plain values; the error names those that differ."""

    def refuse(reports: list[dict[str, Any]]) -> None:
        different = _differences(reports)
        if different:
            name, rank, _ = different[0]
            more = len({name for name, _, _ in different}) - 1
            raise InputValueError(
                f"{what} {name}{f' (and {more} more)' if more else ''} of rank {rank} differs from that of rank 0, "
                f"expected the same on every rank; {remedy}"
            )

    return Expectation(lambda: fingerprints(tensors), refuse)


def fingerprints(tensors: Mapping[str, Any]) -> dict[str, tuple[object, ...]]:
    """Return shape, dtype, and fingerprint of tensors, and plain values unchanged."""
    prints = [fingerprint(value) for value in tensors.values() if isinstance(value, Tensor)]
    numbers = iter(
        torch.stack([tensor_print.to(prints[0].device) for tensor_print in prints]).tolist() if prints else []
    )
    return {
        name: (tuple(value.shape), str(value.dtype), next(numbers)) if isinstance(value, Tensor) else (value,)
        for name, value in tensors.items()
    }


def same_outputs(outputs: Tensor, precision: float) -> Expectation:
    """Expect equal outputs of a network for the same samples; the error names the ranks that differ.

    The weights are equal, so differences come from code, plain attributes, or the readout. `precision` is the machine
    epsilon of the weights; equal networks on different hardware differ by rounding.
    """

    def refuse(reports: list[Tensor]) -> None:
        first = reports[0]
        tolerance = max(precision, torch.finfo(first.dtype).eps) ** 0.5 * float(first.abs().max())
        different_ranks = [
            str(rank)
            for rank, outputs_of_rank in enumerate(reports)
            if (outputs_of_rank.shape, outputs_of_rank.dtype) != (first.shape, first.dtype)
            or not bool(((outputs_of_rank - first).abs() <= tolerance).all())
        ]
        if different_ranks:
            raise InputValueError(
                f"the model or its readout gives other outputs on rank{'s' * (len(different_ranks) > 1)} "
                f"{', '.join(different_ranks)} than on rank 0, for the same samples and weights, expected the same "
                "network on every rank; compare the readouts, and attributes of the model that are neither weights "
                "nor buffers"
            )

    return Expectation(lambda: outputs.detach().cpu(), refuse)


def _differences(reports: Sequence[Mapping[str, Any]]) -> list[tuple[str, int, Any]]:
    """Return (name, rank, value) for values that differ from rank 0."""
    return [
        (name, rank, report_of_rank.get(name))
        for name in dict.fromkeys(name for report in reports for name in report)
        for rank, report_of_rank in enumerate(reports)
        if report_of_rank.get(name) != reports[0].get(name)
    ]


def smallest_budget(group: RankGroup, budget: int, device: torch.device, *, measured: bool) -> int:
    """Return the smallest byte budget of all ranks, which every rank uses.

    With `measured`, the budget is a share of free memory, and is divided among ranks on the same device.
    """
    reports = group.numbers([digest((platform.node(), str(device))), min(budget, 2**62), int(measured)])
    devices = [place for place, _, _ in reports]
    return min(size // (devices.count(place) if shared else 1) for place, size, shared in reports)
