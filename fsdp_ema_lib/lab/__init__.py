"""What the notebooks share: real data, a small model, its training, its measure, plots and runs."""
