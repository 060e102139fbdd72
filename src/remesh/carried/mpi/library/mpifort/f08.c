/* What the module mpi_f08 of MPICH, compiled by gfortran, has besides the calls that fortran.py makes: constants that are
 * addresses, operators of handles, functions under the module's own names.
 */
#include "descriptor.h"

/* ---- Functions that are no translation of C's ---- */

EXPORTED double mpi_wtime_f08_(void);
double mpi_wtime_f08_(void) { return PMPI_Wtime(); }
EXPORTED double mpi_wtick_f08_(void);
double mpi_wtick_f08_(void) { return PMPI_Wtick(); }
EXPORTED MPI_Aint mpi_aint_add_f08_(const MPI_Aint *base, const MPI_Aint *offset);
MPI_Aint mpi_aint_add_f08_(const MPI_Aint *base, const MPI_Aint *offset) { return *base + *offset; }
EXPORTED MPI_Aint mpi_aint_diff_f08_(const MPI_Aint *first, const MPI_Aint *second);
MPI_Aint mpi_aint_diff_f08_(const MPI_Aint *first, const MPI_Aint *second) { return *first - *second; }
EXPORTED void mpi_pcontrol_f08_(const MPI_Fint *level);
void mpi_pcontrol_f08_(const MPI_Fint *level) { (void)level; }
/* The compiler believes that it may change the array; that is all. */
EXPORTED void mpi_f_sync_reg_f08ts_(const Descriptor *buf);
void mpi_f_sync_reg_f08ts_(const Descriptor *buf) { (void)buf; }

/* Here Fortran gets the address. */
EXPORTED void mpi_buffer_detach_f08_(void **address, MPI_Fint *size, MPI_Fint *ierror);
void mpi_buffer_detach_f08_(void **address, MPI_Fint *size, MPI_Fint *ierror) {
    tell(ierror, PMPI_Buffer_detach(address, size));
}
EXPORTED void mpi_buffer_detach_f08_large_(void **address, MPI_Count *size, MPI_Fint *ierror);
void mpi_buffer_detach_f08_large_(void **address, MPI_Count *size, MPI_Fint *ierror) {
    tell(ierror, PMPI_Buffer_detach_c(address, size));
}

/* ---- Handles are structs of one number ---- */

#define COMPARED(name, operator, result)                                                                         \
    EXPORTED MPI_Fint __mpi_f08_types_MOD_mpi_##name##_##operator(const MPI_Fint *one, const MPI_Fint *other);   \
    MPI_Fint __mpi_f08_types_MOD_mpi_##name##_##operator(const MPI_Fint *one, const MPI_Fint *other) { return result; }
/* With another handle, and with a number of mpif.h on either side. */
#define OPERATORS(name)                     \
    COMPARED(name, eq, *one == *other)      \
    COMPARED(name, f08_eq_f, *one == *other) \
    COMPARED(name, f_eq_f08, *one == *other) \
    COMPARED(name, neq, *one != *other)     \
    COMPARED(name, f08_neq_f, *one != *other) \
    COMPARED(name, f_neq_f08, *one != *other)
OPERATORS(comm)
OPERATORS(datatype)
OPERATORS(errhandler)
OPERATORS(file)
OPERATORS(group)
OPERATORS(info)
OPERATORS(message)
OPERATORS(op)
OPERATORS(request)
OPERATORS(session)
OPERATORS(win)

/* A status is the same in both languages. */
#define STATUS_COPIED(name)                                                                                        \
    EXPORTED void __mpi_f08_types_MOD_mpi_status_##name(const MPI_Status *from, MPI_Status *to, MPI_Fint *ierror); \
    void __mpi_f08_types_MOD_mpi_status_##name(const MPI_Status *from, MPI_Status *to, MPI_Fint *ierror) {         \
        *to = *from;                                                                                               \
        tell(ierror, MPI_SUCCESS);                                                                                 \
    }
STATUS_COPIED(f082f)
STATUS_COPIED(f2f08)

/* ---- MPI_Sizeof, of both modules: the compiler has chosen by the type ---- */

#define SIZEOF(name, bytes)                                                              \
    EXPORTED void name(const void *array, MPI_Fint *size, MPI_Fint *ierror);             \
    void name(const void *array, MPI_Fint *size, MPI_Fint *ierror) {                     \
        (void)array;                                                                     \
        *size = bytes;                                                                   \
        tell(ierror, MPI_SUCCESS);                                                       \
    }
#define SIZEOF_BY_F08(type, bytes) SIZEOF(__mpi_f08_types_MOD_mpi_sizeof_##type, bytes)
SIZEOF_BY_F08(character, 1)
SIZEOF_BY_F08(logical, 4)
SIZEOF_BY_F08(xint8, 1)
SIZEOF_BY_F08(xint16, 2)
SIZEOF_BY_F08(xint32, 4)
SIZEOF_BY_F08(xint64, 8)
SIZEOF_BY_F08(xreal32, 4)
SIZEOF_BY_F08(xreal64, 8)
SIZEOF_BY_F08(xreal128, 16)
SIZEOF_BY_F08(xcomplex32, 8)
SIZEOF_BY_F08(xcomplex64, 16)
SIZEOF_BY_F08(xcomplex128, 32)
/* Of one and of an array. */
#define SIZEOF_BY_MPI(type, bytes)                         \
    SIZEOF(__mpi_sizeofs_MOD_mpi_sizeof_##type, bytes)     \
    SIZEOF(__mpi_sizeofs_MOD_mpi_sizeof_##type##v, bytes)
SIZEOF_BY_MPI(ch, 1)
SIZEOF_BY_MPI(cx, 8)
SIZEOF_BY_MPI(d, 8)
SIZEOF_BY_MPI(i, 4)
SIZEOF_BY_MPI(i1, 1)
SIZEOF_BY_MPI(i2, 2)
SIZEOF_BY_MPI(i8, 8)
SIZEOF_BY_MPI(l, 4)
SIZEOF_BY_MPI(r, 4)
