"""Trainer, TrajectoryBuilder, TrainerAdapter, and what they exchange."""
