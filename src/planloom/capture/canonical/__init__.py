"""One spelling for what torch spells in several ways.

| torch                                        | here                                                              |
|----------------------------------------------|-------------------------------------------------------------------|
| view, _unsafe_view, flatten, squeeze         | reshape                                                           |
| split, chunk, unbind                         | slices, selects                                                   |
| stack, slice_scatter, select_scatter, copy   | cat of pieces; a slice of one piece is that piece                 |
| repeat, repeat_interleave                    | reshape, expand, reshape                                          |
| topk, sort, max and min along a dim          | the indices, and a gather                                         |
| zeros_like, new_ones, empty, …               | full                                                              |
| x[i], x[:, i]; x[arange(n), i]               | index_select; gather                                              |
| batch norm                                   | its parts; running statistics are results                         |
| losses with a reduction                      | the same without, then mean or sum                                |
| convolutions                                 | our own, whose number of groups follows from the shapes           |
| dropout                                      | our own, whose mask depends on the element alone                  |
| rand, randn, bernoulli                       | our own uniform and normal numbers                                |
| attention with dropout                       | products, softmax, dropout                                        |

A form is a function from the translator and a node to the name of the result (or of all results, None for those that
have none); None leaves the node as it is.
"""

from planloom.capture.canonical import chance, indices, layers, shapes
from planloom.capture.canonical.table import CANONICAL, is_identity

# Each module puts its forms into the table when it is imported.
__all__ = ["CANONICAL", "chance", "indices", "is_identity", "layers", "shapes"]
