"""What a run will do and take, before it starts: its stages and their seconds, memory, bytes. `plan.py` is the dry run.

The progress display takes the stages from here too.
"""
