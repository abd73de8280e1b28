"""State on disk: a run's checkpoints (store.py), and models as Hugging Face has them (export_hf.py, import_hf.py)."""
