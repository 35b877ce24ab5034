"""A strategy's device half as programs: train programs with their roles, adapters, and the contrastive loss."""
