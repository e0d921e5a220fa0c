"""What an engine has done since it began. Only ever grows, so another thread may read it at any time."""

from __future__ import annotations

from dataclasses import dataclass, field

from draftwood.config import MAX_BLOCK, MAX_BUDGET, STAGES


@dataclass
class Totals:
    """Counts over all steps and rows. A row that decodes in a step is a row-step."""

    steps: int = 0
    stage_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    prompt_tokens: int = 0
    """Tokens that went through the target as chunks: of prompts, and again of answers that were preempted."""
    prefix_queries: int = 0
    """Prompt tokens that were looked for in the prefix cache."""
    prefix_hits: int = 0
    """Those of them that were there."""
    decoded: int = 0
    """Tokens that row-steps returned, before any stop or limit."""
    row_steps: int = 0
    drafted: int = 0
    """Row-steps whose tree had nodes beyond its root."""
    trees: list[int] = field(default_factory=lambda: [0] * (MAX_BUDGET + 1))
    """Row-steps by nodes beyond the root."""
    accepted: list[int] = field(default_factory=lambda: [0] * MAX_BLOCK)
    """Row-steps by accepted nodes beyond the root, which is the depth of the last one."""

    def step(self, seconds: dict[str, float]) -> None:
        """Count a step and its seconds by stage."""
        self.steps += 1
        for stage, spent in seconds.items():
            self.stage_seconds[stage] += spent

    def prompt(self, tokens: int) -> None:
        """Count a prompt chunk."""
        self.prompt_tokens += tokens

    def looked_up(self, tokens: int, found: int) -> None:
        """Count a prompt of `tokens` tokens, `found` of which the prefix cache had."""
        self.prefix_queries += tokens
        self.prefix_hits += found

    def row(self, nodes: int, accepted: int) -> None:
        """Count a row-step with `nodes` beyond the root, `accepted` of which were."""
        self.row_steps += 1
        self.drafted += nodes > 0
        self.decoded += accepted + 1
        self.trees[nodes] += 1
        self.accepted[accepted] += 1
