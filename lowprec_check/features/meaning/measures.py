"""All measures, in the order in which they choose tensors of an output."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lowprec_check.engine.model.output_measures import Figure, Measured, OutputMeasure, Part
from lowprec_check.engine.model.output_tensors import OutputForm
from lowprec_check.features.meaning.audio import Audio
from lowprec_check.features.meaning.boxes import Boxes
from lowprec_check.features.meaning.embeddings import Embeddings
from lowprec_check.features.meaning.logits import Choices
from lowprec_check.features.meaning.masks import Masks
from lowprec_check.features.meaning.pictures import Pictures
from lowprec_check.torchkit.floating_dtypes import is_float


class Integers(OutputMeasure):
    """The share of integers and booleans that are equal, beside floating tensors."""

    name = "integers"
    limited = {"equal": "share"}
    is_main = False

    def parts(self, form: OutputForm, output: Sequence[Tensor]) -> list[dict[str, int]]:
        """All of them; without floating ones, rel_l2 takes the share already."""
        integers = [number for number, tensor in enumerate(output) if not is_float(tensor) and tensor.numel()]
        if form.judge is None and len(integers) == sum(tensor.numel() > 0 for tensor in output):
            return []
        return [{"values": number} for number in integers]

    def compare(self, output: Sequence[Part], reference: Sequence[Part], tolerance: float) -> Measured:
        """The least share of equal values; as many may differ as the tolerance says of values."""
        least = 1.0
        for low, fp32 in zip(output, reference, strict=True):
            if low["values"].shape != fp32["values"].shape:
                least = 0.0
            else:
                least = min(least, float((low["values"] == fp32["values"]).double().mean()))
        words = "{} of the integers and booleans are equal"
        return Measured({"equal": Figure(least, words, max(0.0, 1.0 - tolerance))})


LOGITS = ("logits", "")
TOKENS = Choices("tokens", "token", ("CausalLMOutput", "MaskedLMOutput", "Seq2SeqLMOutput"), -1, LOGITS)
CLASSES = Choices("classes", "class", ("ImageClassifierOutput", "SequenceClassifierOutput"), -1, LOGITS)
PIXELS = Choices("pixels", "pixel", ("SemanticSegmenterOutput", "OrderedDict"), 1, (*LOGITS, "out"))
BOXES = Boxes()
PICTURE = Pictures()
MASKS = Masks()
EMBEDDINGS = Embeddings()
AUDIO = Audio()
INTEGERS = Integers()
