"""What a training script does wrong with autocast and ``GradScaler``."""
