from requant.formats.quantized_weight import slice_columns


def test_aligned_cuts_keep_the_groups_and_others_make_them_finer(random_weight) -> None:
    weight = random_weight(8, 192, kind="asymmetric")
    assert slice_columns(weight, 96, 192).dense.group_size == 48
    finer = slice_columns(weight, 72, 192).dense
    assert finer.group_size == 24 and finer.scales.shape == (8, 5)
    row_groups = random_weight(8, 40, kind="asymmetric")  # one group, 48 wide on paper
    assert slice_columns(row_groups, 0, 20).dense.scales.shape == (8, 1)
