"""Everything that runs a model. With pytest_plugin/fixture the only room that imports torch."""
