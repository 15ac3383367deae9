"""Step times of one degree as the simulator asks for them, some hundred thousand times an hour.

The figures are `StepModel`'s; what depends on whole numbers is kept, what is linear is a product.
"""

from __future__ import annotations

from dynamictp.cost.steps import StepModel

_KEPT = 200_000
"""(tokens, sampled) pairs that are kept."""


class StepTimes:
    """Memo of a step model. Seconds."""

    def __init__(self, model: StepModel) -> None:
        self.model = model
        self._base: dict[tuple[int, int], float] = {}
        self._attention: dict[int, float] = {}
        """By rows: seconds per token of context, where attention is linear in it."""
        self._linear = not model.domain.shape.windowed_layers

    def base_s(self, tokens: int, sampled: int) -> float:
        """A pass over `tokens` tokens without attention, `sampled` of them with logits."""
        key = tokens, sampled
        known = self._base.get(key)
        if known is None:
            if len(self._base) >= _KEPT:
                self._base.clear()
            known = self._base[key] = self.model.base(tokens, sampled).total_s
        return known

    def decode_attention_s(self, rows: int, context: float) -> float:
        """Attention of `rows` new tokens over `context` tokens each."""
        if not self._linear:
            return self.model.decode_attention_s(rows, context)
        slope = self._attention.get(rows)
        if slope is None:
            # Bytes and FLOPs are both in proportion to the context, so their roofline is too.
            slope = self._attention[rows] = self.model.decode_attention_s(rows, 1.0)
        return slope * context

    def decode_s(self, rows: int, context: float) -> float:
        """One token for each of `rows` requests."""
        return self.base_s(rows, rows) + self.decode_attention_s(rows, context)

    def prompt_attention_s(self, tokens: int, past: float) -> float:
        return self.model.prompt_attention_s(tokens, past)

    def prompt_token_s(self, budget: int) -> float:
        """A prompt token in a full step."""
        return self.base_s(budget, 1) / budget
