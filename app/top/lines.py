"""What ``app.top`` writes of a fleet: lines and cells of text, each readable without color."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

BLOCKS = (
    ("shared", "█", "magenta"),
    ("referenced", "▓", "blue"),
    ("cached", "░", "cyan"),
    ("free", "·", "dim"),
)
"""The word, sign and style of each state of a block, in the order of the events."""

_STATES = "free", "cached", "referenced", "shared"
_HOST_STATES = "free", "host", "host", "host"
_SIGNS = {name: (sign, style) for name, sign, style in BLOCKS} | {"host": ("▒", "yellow")}

_SPARKS = "▁▂▃▄▅▆▇█"

TOTALS = {
    "moved_requests": "moved",
    "resubmissions": "sent again",
    "lost_channels": "channels lost",
    "dead_engines": "engines died",
    "lost_leases": "leases lost",
    "faults": "defects",
}


def number(value: float) -> str:
    """With a separator for thousands; a decimal below 100 if it has one."""
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:,.1f}"


def short(value: float) -> str:
    """A number in at most five characters, if it is below a quadrillion."""
    if value < 9999.5:
        return number(value)
    for scale, unit in ((1e3, "k"), (1e6, "M"), (1e9, "G")):
        if value < 999.5 * scale:
            return f"{value / scale:.0f}{unit}"
    return f"{value / 1e12:.0f}T"


def percent(value: float | None) -> str:
    """A share in percent."""
    return "–" if value is None else f"{100 * value:.0f}%"


def seconds(value: float | None) -> str:
    """A duration in ms or s."""
    if value is None:
        return "–"
    return f"{number(round(1000 * value, 1))} ms" if value < 1 else f"{number(round(value, 1))} s"


def short_name(replica: str) -> str:
    """What tells a replica from the others of its deployment."""
    return replica.rpartition("#")[2]


def bar(blocks: Sequence[int], width: int) -> Text:
    """The shares of a pool's blocks, in cells; what there is at all has one at least."""
    total = sum(blocks) or 1
    exact = [width * count / total for count in blocks]
    cells = [max(int(share), 1 if count else 0) for share, count in zip(exact, blocks, strict=True)]
    while sum(cells) > width:
        cells[max(range(len(cells)), key=lambda at: cells[at] - exact[at] if cells[at] > 1 else -width)] -= 1
    while sum(cells) < width and any(blocks):
        cells[max(range(len(cells)), key=lambda at: exact[at] - cells[at])] += 1
    text = Text()
    for (_, sign, style), count in zip(BLOCKS, cells, strict=True):
        text.append(sign * count, style)
    return text


def legend() -> Text:
    """What the signs of a bar mean."""
    text = Text("KV blocks: ", "dim")
    for name, sign, style in BLOCKS:
        text.append(sign, style)
        text.append(f" {name}  ", "dim")
    return text


def block_map_text(found: Mapping[str, Any]) -> Text:
    """Every cell of a block map, by position."""
    text = Text()
    for digits, states in ((found["device"], _STATES), (found["host"], _HOST_STATES)):
        if digits and text:
            text.append("\n\nOn the host (▒ swapped):\n")
        for digit in digits:
            text.append(*_SIGNS[states[int(digit)]])
    each = found["each"]
    text.append(
        "\n\nEach sign is a block, by position."
        if each == 1
        else f"\n\nEach sign is the first of {each} blocks."
    )
    return text


def spark(values: Sequence[float | None], width: int) -> str:
    """The last values, as heights from 0 to their largest."""
    last = values[-width:]
    most = max((value for value in last if value), default=0.0) or 1.0
    return "".join(" " if value is None else _SPARKS[min(int(8 * value / most), 7)] for value in last)


def summary(shown: Mapping[str, Any]) -> list[str]:
    """What the cards of the live page say, in lines of 80 characters at most, unless a reason is long."""
    fleet, latency, scaling = shown["fleet"], shown["latency"], shown["scaling"]
    replicas = shown["replicas"]
    opened = sum(replica["state"] == "open" for replica in replicas)
    demand = percent(fleet["demand"] / fleet["pool"]) if fleet["pool"] else "–"

    def percentiles(name: str) -> str:
        return f"{seconds(latency[name]['p50'])}, 95%: {seconds(latency[name]['p95'])}"

    lines = [
        f"Tokens/s     {number(fleet['tokens_s'])} out, {number(fleet['prompt_tokens_s'])} of prompts"
        f"   KV demand {demand} of {number(fleet['pool'])} blocks",
        f"First token  {percentiles('first_token')}   Between tokens {percentiles('inter_token')}",
        f"Queue        {number(fleet['waiting'])} waiting, {number(fleet['live'])} live;"
        f" waited {seconds(latency['queue']['p50'])}   Preemptions {number(shown['totals']['preemptions'])}",
        f"Replicas     {opened} of {len(replicas)} open" + _target(scaling),
    ]
    return lines


def _target(scaling: Mapping[str, Any] | None) -> str:
    if scaling is None:
        return ", a fixed number"
    held = f"; held by: {scaling['held_by']}" if scaling["held_by"] else ""
    return f", target {scaling['target']}: {scaling['reason']}{held}"


def counted(counts: Mapping[str, int], empty: str) -> str:
    """The largest first."""
    listed = sorted(counts.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{name} {number(count)}" for name, count in listed) or empty


def below(shown: Mapping[str, Any]) -> list[str]:
    """What decided and how requests ended, lately; what has happened since the start."""
    within = f"none in {shown['seconds']:.0f} s"
    refused = {f"refused: {name}": count for name, count in shown["refused"].items()}
    since = {word: shown["totals"][name] for name, word in TOTALS.items() if shown["totals"][name]}
    return [
        f"Decided by   {counted(shown['routing'], within)}",
        f"Ended        {counted({**shown['ended'], **refused}, within)}",
        f"Since start  {counted(since, 'no moves, losses, or defects')}",
    ]


def replica_cells(replica: Mapping[str, Any], width: int) -> list[Text]:
    """A row of the table; the bar has ``width`` cells."""
    name = Text(short_name(replica["name"]))
    if "blocks" not in replica:
        return [name, Text(replica["state"], "bold"), *(Text("–", justify="right") for _ in range(7))]
    waiting = replica["waiting"] + replica["preempted"] + replica["swapped"]
    state = bar(replica["blocks"], width) if replica["state"] == "open" else Text(replica["state"], "bold")
    figures = (
        percent(replica["demand"] / max(replica["pool"], 1)),
        short(replica["running"]),
        short(waiting),
        short(replica["tokens_s"]),
        percent(replica["hit_share"]),
        seconds(replica["step_s"]),
        short(replica["preemptions"]),
    )
    return [name, state, *(Text(figure, justify="right") for figure in figures)]


def replica_lines(replica: Mapping[str, Any]) -> list[str]:
    """One replica in detail."""
    if "blocks" not in replica:
        return [f"State                {replica['state']}", "It has not reported any figures yet."]
    counts = ", ".join(
        f"{number(count)} {name}" for (name, *_), count in zip(BLOCKS, replica["blocks"], strict=True)
    )
    figures = {
        "Channel": replica["state"],
        "KV blocks": counts,
        "KV demand, blocks": f"{number(replica['demand'])} of {number(replica['pool'])}",
        "Host blocks used": f"{number(replica['host'][0])} of {number(replica['host'][1])}",
        "Running, waiting": f"{replica['running']}, {replica['waiting']}",
        "Preempted, swapped": f"{replica['preempted']}, {replica['swapped']}",
        "Output tokens/s": number(replica["tokens_s"]),
        "Prompt tokens/s": number(replica["prompt_tokens_s"]),
        "Cache hits": percent(replica["hit_share"]),
        "Step": seconds(replica["step_s"]),
        "Prefill rate": f"{number(replica['prefill_rate'])} tokens/s",
        "Tokens so far": f"{number(replica['prompt_tokens'])} of prompts, "
        f"{number(replica['generated_tokens'])} out",
        "Sequences that ended": counted({k: v for k, v in replica["finished"].items() if v}, "none"),
        "Preemptions": number(replica["preemptions"]),
        "Finished recoveries": counted({k: v for k, v in replica["recoveries"].items() if v}, "none"),
        "Copied on write": number(replica["copied_blocks"]),
        "Leases lost": number(replica["lost_leases"]),
    }
    return [f"{name:<21}{text}" for name, text in figures.items()]


def prefix_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Shared prefixes, where their prompts went and why; the words, if they may be seen, are below each."""
    found = [f"{'Prefix':<17}{'Blocks':>6}{'Req/s':>7}{'Cached':>8}  Replicas, with requests and reasons"]
    for row in rows:
        if not row["requests"] and len(rows) > 1:
            continue
        name = row["prefix"] or ("all others" if len(rows) > 1 else "no common prefix")
        blocks = number(row["blocks"]) if row["blocks"] else "–"
        to = [
            f"{short_name(one['replica'])} {number(one['requests'])} ({counted(one['reasons'], '–')})"
            for one in row["to"]
        ]
        to += [f"{row['more']} more"] if row["more"] else []
        found.append(
            f"{name:<17}{blocks:>6}{number(round(row['per_s'], 1)):>7}{percent(row['cached']):>8}  "
            f"{'; '.join(to) or '–'}"
        )
        if row["words"]:
            # Whatever a client sent: what is not printable could command the terminal.
            found.append(f"  {''.join(sign if sign.isprintable() else ' ' for sign in row['words'])}…")
    return found
