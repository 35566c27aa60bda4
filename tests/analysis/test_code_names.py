"""Names that printed code imports keep their meaning."""

from __future__ import annotations

import pytest

from lowprec_check.analysis.snippet import with_names, without_rebinding


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("from a import model\nmodel = model()\nmodel(1)", "from a import model\nnet = model()\nnet(1)"),
        ("from a import model\nmodel.half()\nmodel(1)", "from a import model\nmodel.half()\nmodel(1)"),
        ("from a import Net\nmodel = Net()\nmodel(1)", "from a import Net\nmodel = Net()\nmodel(1)"),
        ("from a import net, model\nnet()\nmodel = model()", "from a import net, model\nnet()\nnet_ = model()"),
        ("from a import model\nmodel = model()", "from a import model\nnet = model()"),
        ("model = model()\nmodel(1)", "model = model()\nmodel(1)"),
        (
            "from a import model\ndef keep(model):\n    return model\nmodel = keep(model)\nkeep(model=model)",
            "from a import model\ndef keep(model):\n    return model\nnet = keep(model)\nkeep(model=net)",
        ),
        (
            "from a import inputs\ninputs = [f(x) for x in inputs]\nwith y:\n    g(inputs, 'inputs')",
            "from a import inputs\nx_ = [f(x) for x in inputs]\nwith y:\n    g(x_, 'inputs')",
        ),
        (
            "from a import inputs\ninputs = {**inputs, 'ü': inputs['ü']}",
            "from a import inputs\nx = {**inputs, 'ü': inputs['ü']}",
        ),
        ("from a import model\nnot python", "from a import model\nnot python"),
    ],
)
def test_what_is_imported_is_not_assigned(code: str, expected: str) -> None:
    assert without_rebinding(code) == expected


def test_a_script_has_names_of_its_own() -> None:
    code = "model.half()\ninputs = inputs.half()\noutput = model(inputs)"
    expected = "self.net.half()\nx = x.half()\noutput = self.net(x)"
    assert with_names(code, {"model": "self.net", "inputs": "x"}) == expected
