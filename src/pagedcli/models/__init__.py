"""Models: config.json -> ModelSpec, weights -> CausalLM. Uses attention backends only through their contract."""
