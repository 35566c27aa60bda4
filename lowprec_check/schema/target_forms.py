"""The ways to name a target, for help and messages. Never imports torch."""

FORMS = "mymodel.py, mymodel.py:make_model, package.module:attr, torchvision:NAME, timm:NAME, transformers:NAME or hf:FOLDER"
