"""Settings of a training run, one module per section, and the presets and schedules they name."""
