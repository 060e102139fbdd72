/* Operations of reductions. */
#ifndef REMESH_OP_H
#define REMESH_OP_H

#include "datatype.h"

struct Op {
    Object object;
    int number;        /* index into ACCESS_OPS of calls/table.py; -1: the program's own */
    bool is_commutative;
    MPI_User_function *function; /* the program's own: one of both */
    MPI_User_function_c *large_function;
    /* A function that calls the program's: of languages whose arguments are others. NULL for C. */
    void (*call)(const struct Op *op, void *in, void *inout, int count, Datatype *type);
    void (*partner)(void); /* of C++: the other one of two functions (cxx.c) */
};

/* MPI_SUCCESS if the operation is defined for the datatype, else fail(MPI_ERR_OP, ...). */
INTERNAL int check_op(const Op *op, const Datatype *type);
/* The same for a collective: some operations are of windows only. */
INTERNAL int check_reduction(const Op *op, const Datatype *type);
/* Whether the real MPI can apply it: then op->number and real_type(type) say how. */
INTERNAL bool is_real(const Op *op, const Datatype *type);
/* inout[i] = in[i] op inout[i] for packed data of `count` elements of `type`; the program's own functions get them as
 * they stand in memory.
 */
INTERNAL void fold(const Op *op, Datatype *type, MPI_Count count, const void *in, void *inout);
/* Makes what is behind the predefined handles, when the library is loaded. */
INTERNAL void make_predefined_ops(void);

#endif
