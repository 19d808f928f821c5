"""What happens before the first long work of a run: its model and texts are opened and checked, its recipe completed.
`prepare.py` is the entrance; `outline.py` does the same from config.json alone, for a plan without weights."""
