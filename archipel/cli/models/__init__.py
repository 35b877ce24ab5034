"""Commands that make, check and compare models and bundles."""
