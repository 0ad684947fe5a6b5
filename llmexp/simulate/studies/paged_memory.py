"""What share of the KV memory holds tokens, by how it is reserved (Kwon et al. 2023, figure 2), and what
copy-on-write saves where samples or beams of a request share their blocks (figure 15)."""

from collections.abc import Sequence
from typing import get_args

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.axes import Axes

from llmexp.errors import WorkloadError
from llmexp.progress import each
from llmexp.report import style
from llmexp.schema.simulation import PagedMemory
from llmexp.simulate.allocators import Allocator, Contiguous, Paged, Reservation, beam_blocks, memory_usage
from llmexp.simulate.studies.drawing import HATCHES, curves, labelled, line, panels
from llmexp.simulate.studies.findings import Findings, Numbers, headline
from llmexp.simulate.studies.setting import Setting

USES = {
    "tokens": "tokens",
    "later": "reserved for later tokens",
    "internal": "internal waste",
    "external": "external waste",
}


def paged_memory(setting: Setting, study: PagedMemory) -> Findings:
    """Serves the workload's lengths from a queue that is never empty, and samples some of its requests several
    times over."""
    prompts = setting.workload.prompt_tokens.astype(np.int64)
    outputs = setting.workload.output_tokens.astype(np.int64)
    _require_fit(prompts + outputs, study)
    reservations = _reservations(prompts, outputs, study)
    sharing = _sharing(prompts, outputs, study, setting.config.seed)
    figure, (memory, saved) = panels(2, height=4.4, width=11)
    _draw_reservations(memory, reservations)
    for place, (method, rows) in enumerate(curves(sharing, "method")):
        line(saved, place, rows["group_size"], 100 * rows["saved_share"], method)
    labelled(
        saved,
        f"Saved by sharing blocks of {study.sharing_block_size}",
        "samples or beams of a request",
        "share of the blocks without sharing (%)",
    )
    saved.set_xticks(list(study.group_sizes))
    saved.set_ylim(0, 100)
    saved.legend(fontsize=9)
    return Findings(
        title="KV memory that holds tokens, by how it is reserved",
        setting=f"{setting.described()}; {study.capacity_tokens:,} tokens of KV memory",
        tables=(
            Numbers(
                "reservations",
                "Shares of the KV memory, averaged over steps with a queue",
                reservations,
                {"reservation": "reserved by", **USES},
            ),
            Numbers(
                "sharing",
                "Blocks saved by copy-on-write sharing",
                sharing,
                {"method": "method", "group_size": "group", "saved_share": "saved", "blocks_alone": "blocks without"},
            ),
        ),
        figure=figure,
        caption=(
            "Left: mean over the steps in which requests wait. Contiguous ranges come from a buddy allocator; paged "
            "memory grows block by block. Right: blocks saved over all steps; beams are those of a search over random "
            f"next-token probabilities, the likeliest {1 / (1 + study.beam_uncertainty):.2f} on average."
        ),
        headline={
            **headline(reservations, "tokens", "reservation"),
            **headline(sharing, "saved_share", "method", "group_size"),
        },
    )


def _require_fit(total: npt.NDArray[np.int64], study: PagedMemory) -> None:
    longest = int(total.argmax())
    if total[longest] > study.max_model_len:
        raise WorkloadError(
            f"request {longest} has {total[longest]} tokens; simulation.max_model_len={study.max_model_len} reserves "
            "too few: raise it, or ask for shorter requests with workload.max_total_tokens"
        )


def _reservations(prompts: npt.NDArray[np.int64], outputs: npt.NDArray[np.int64], study: PagedMemory) -> pd.DataFrame:
    allocators: dict[str, Allocator] = {
        reservation: Contiguous(study.capacity_tokens, reservation, study.max_model_len)
        for reservation in get_args(Reservation)
    }
    allocators |= {f"blocks of {size}": Paged(study.capacity_tokens, size) for size in study.block_sizes}
    rows = [
        {"reservation": name, **memory_usage(prompts, outputs, allocator)._asdict()}
        for name, allocator in each("Simulating how memory is reserved", list(allocators.items()))
    ]
    return pd.DataFrame(rows)


def _sharing(
    prompts: npt.NDArray[np.int64], outputs: npt.NDArray[np.int64], study: PagedMemory, seed: int
) -> pd.DataFrame:
    """Blocks of all steps of some requests, spread over the workload, with and without sharing."""
    some = np.unique(np.linspace(0, len(prompts) - 1, study.sharing_requests).astype(int))
    cases = [(method, size) for method in ("parallel samples", "beams") for size in study.group_sizes]
    rows = []
    for method, size in each("Simulating samples and beams", cases):
        rng = np.random.default_rng(seed)
        with_sharing = alone = 0
        for prompt, output in zip(prompts[some].tolist(), outputs[some].tolist(), strict=True):
            parents = samples(size, output) if method != "beams" else beams(rng, size, output, study.beam_uncertainty)
            counts = beam_blocks(prompt, parents, study.sharing_block_size)
            with_sharing += sum(counts[0])
            alone += sum(counts[1])
        rows.append(
            {
                "method": method,
                "group_size": size,
                "saved_share": 1 - with_sharing / alone,
                "blocks_with_sharing": with_sharing,
                "blocks_alone": alone,
                "requests": len(some),
            }
        )
    return pd.DataFrame(rows)


def samples(size: int, steps: int) -> list[Sequence[int]]:
    """The parents of `size` independent samples: the prompt, then each itself."""
    return [[0] * size, *[range(size)] * (steps - 1)]


def beams(rng: np.random.Generator, size: int, steps: int, uncertainty: float) -> list[Sequence[int]]:
    """The parents that beam search chooses where next-token probabilities are random.

    The `size` likeliest tokens of each beam have the probabilities that a stick broken again and again leaves
    (each break takes a Beta(1, `uncertainty`) share of the rest); the `size` likeliest continuations go on.
    """
    scores = np.zeros(1)
    parents: list[Sequence[int]] = []
    for _ in range(steps):
        taken = rng.beta(1.0, uncertainty, (len(scores), size))
        left = np.cumprod(1 - taken, axis=1) / (1 - taken)
        tokens = -np.sort(-taken * left, axis=1)
        candidates = (scores[:, None] + np.log(np.maximum(tokens, 1e-300))).ravel()
        best = np.argsort(-candidates, kind="stable")[:size]
        parents.append((best // size).tolist())
        scores = candidates[best]
    return parents


def _draw_reservations(panel: Axes, rows: pd.DataFrame) -> None:
    base = np.zeros(len(rows))
    shades = (style.colour(1), "#bbbbbb", "white", "white")
    for (column, name), hatch, shade in zip(USES.items(), ("", "", HATCHES[1], HATCHES[2]), shades, strict=True):
        share = 100 * rows[column].to_numpy()
        panel.barh(
            rows["reservation"],
            share,
            left=base,
            color=shade,
            edgecolor="black",
            hatch=hatch,
            linewidth=0.5,
            label=name,
        )
        base += share
    for i, share in enumerate(100 * rows["tokens"]):
        panel.text(1.5, i, f"{share:.1f}", va="center", color="white", fontsize=9)
    labelled(panel, "How the memory is used", "share of the KV memory (%)", "")
    panel.invert_yaxis()
    panel.set_xlim(0, 100)
    panel.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.17))
