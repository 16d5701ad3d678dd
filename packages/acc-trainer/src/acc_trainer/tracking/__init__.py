"""Experiment trackers: one file each over one small interface."""
