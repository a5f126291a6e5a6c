"""Operations on batch dimensions: indices, shapes, joins, rows in another order."""
