"""What the softmax of a layer is worth: how much worse a model predicts and recalls when that layer has another mixer.

Few layers carry most of what reaches far back: where they keep their softmax, most of the model is kept.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mercer.evaluate.perplexity import evaluate
from mercer.evaluate.recall import Question, recall_of
from mercer.hf import attach, detach
from mercer.hf.layers import borrowers, choose_layers


@dataclass(frozen=True)
class Standing:
    """How well a model predicts text, and recalls a number, both in nats per token; recall None: not asked."""

    loss: float
    recall: float | None
    accuracy: float | None  # share of the numbers recalled


@dataclass(frozen=True)
class LayerCosts:
    """What converting each layer alone costs.

    Attributes:
        original: the model as it was.
        alone: with one layer converted, by its number.
    """

    original: Standing
    alone: dict[int, Standing]

    def loss(self, layer: int) -> float:
        """Return the nats per token that a layer's conversion adds to the loss."""
        return self.alone[layer].loss - self.original.loss

    def recall(self, layer: int) -> float:
        """Return the nats per token that it adds to the loss of the number recalled; 0 where none was asked for."""
        now, before = self.alone[layer].recall, self.original.recall
        return 0.0 if now is None or before is None else now - before

    def shares(self) -> dict[int, float]:
        """Return each layer's share of all the loss that conversions add, and of all the recall, averaged.

        >>> at = lambda loss, recall: Standing(loss, recall, None)
        >>> LayerCosts(at(2.0, 1.0), {0: at(2.1, 1.0), 1: at(2.3, 3.0), 2: at(1.9, 1.0)}).shares()
        {0: 0.125, 1: 0.875, 2: 0.0}
        """
        parts = []
        for cost in (self.loss, self.recall):
            costs = {layer: max(0.0, cost(layer)) for layer in self.alone}
            total = sum(costs.values())
            if total:
                parts.append({layer: value / total for layer, value in costs.items()})
        return {layer: round(sum(p[layer] for p in parts) / max(1, len(parts)), 6) for layer in self.alone}

    def dearest(self, count: int) -> list[int]:
        """Return the layers whose softmax is worth most, in their order."""
        shares = self.shares()
        return sorted(sorted(shares, key=lambda layer: -shares[layer])[:count])


def layer_costs(
    model: Any,
    batches: Iterable[Any],
    questions: Sequence[Question] = (),
    mixer: str = "window",
    *,
    watch: Callable[[int, int], None] = lambda done, layers: None,
    **options: Any,
) -> LayerCosts:
    """Convert one layer at a time, measure, and put it back; the model ends as it was.

    Args:
        model: a causal language model of transformers without mixers.
        batches: text to predict.
        questions: facts to recall, see `mercer.evaluate.recall.questions`; none: only the text counts.
        mixer: what a layer gets; the window alone by default: it shows who reaches beyond it.
        watch: told how many layers are measured, and of how many.
        **options: of the mixer.

    Raises:
        ValueError: layers share their keys, so none of them can be converted alone; and see `mercer.attach`.

    Cost: as many passes over text and questions as there are layers, and one more.
    """
    batches = list(batches)

    def stand() -> Standing:
        found = recall_of(model, questions) if questions else None
        return Standing(
            evaluate(model, batches).loss,
            None if found is None else found.loss,
            None if found is None else found.accuracy,
        )

    chosen = choose_layers(model, "all")[0]
    layers = sorted({layer.index for layer in chosen})
    if shared := sorted(layer.index for layer in borrowers(chosen)):
        raise ValueError(
            f"layers {shared} of {type(model).__name__} use the keys of others, so they cannot be converted one at a "
            "time, which is how layers are measured here"
        )
    original, alone = stand(), {}
    watch(0, len(layers))
    for done, layer in enumerate(layers, 1):
        attach(model, mixer, layers=[layer], **options)
        try:
            alone[layer] = stand()
        finally:
            detach(model)
        watch(done, len(layers))
    return LayerCosts(original, alone)
