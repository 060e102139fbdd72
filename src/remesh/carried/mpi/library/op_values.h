/* What the predefined operations do with values. */
#ifndef REMESH_OP_VALUES_H
#define REMESH_OP_VALUES_H

#include "basic.h"

/* inout[i] = in[i] op inout[i] for `count` values without gaps, wherever they begin. */
typedef void Fold(const void *in, void *inout, MPI_Count count);
/* `op`: index into ACCESS_OPS of calls/table.py. NULL: the operation is not defined for such values. */
INTERNAL Fold *fold_of(int op, Basic basic);

#endif
