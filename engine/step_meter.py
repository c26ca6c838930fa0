"""How fast an engine steps, smoothed, as it is reported to those who place requests."""

from __future__ import annotations

from engine.step import StepPlan

_WEIGHT = 0.1  # of the newest step
_MIN_PROMPT_TOKENS = 32  # a step with fewer says more about its decode rows than about prefill


class StepMeter:
    """Exponentially weighted means over the steps added; 0 until there is one."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self.prefill_tokens_per_s = 0.0

    def add(self, seconds: float, plan: StepPlan) -> None:
        """A step with work took `seconds`; the tokens of its chunks are prompt tokens."""
        self.step_s = _smoothed(self.step_s, seconds)
        num_prompt_tokens = plan.num_tokens - len(plan.decode)
        if num_prompt_tokens >= _MIN_PROMPT_TOKENS and seconds > 0:
            self.prefill_tokens_per_s = _smoothed(self.prefill_tokens_per_s, num_prompt_tokens / seconds)


def _smoothed(mean: float, newest: float) -> float:
    return mean + _WEIGHT * (newest - mean) if mean else newest
