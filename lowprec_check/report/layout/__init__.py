"""The formats that lay out blocks: text, Markdown, HTML."""
