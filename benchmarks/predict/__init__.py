"""The papers' own performance models, and the figures that docs/perfmodel.md draws with ours."""
