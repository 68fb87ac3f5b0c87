"""What runs: config.json -> ModelSpec, weights -> CausalLM. Knows attention backends by their contract only."""
