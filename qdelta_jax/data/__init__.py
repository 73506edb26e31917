"""Text that ships with the library; README.md says what it is, `training.documents.sample_text` finds it."""
