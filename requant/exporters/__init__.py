"""A checkpoint in a form that other programs read without requant: one file a target, `export.py` chooses. (Not `export`:
that name is the public function.)"""
