/* The entry points for Fortran that are the same in both libraries that have them: each includes this once, behind its own
 * fortran.h.
 */
#ifndef REMESH_FORTRAN_SHARED_ENTRIES_H
#define REMESH_FORTRAN_SHARED_ENTRIES_H

/* ---- Texts and indices ---- */

char *text_of_fortran(const char *text, size_t length) {
    while (length && text[length - 1] == ' ') length--;
    while (length && *text == ' ') text++, length--;
    char *made = NEW_ARRAY(char, length + 1);
    memcpy(made, text, length);
    return made;
}

void text_to_fortran(bool is_there, const char *text, char *to, size_t length) {
    if (!is_there) return;
    size_t used = strlen(text) < length ? strlen(text) : length;
    memcpy(to, text, used);
    memset(to + used, ' ', length - used);
}

void count_from_one(int *indices, int count) {
    for (int i = 0; i < count; i++)
        if (indices[i] != MPI_UNDEFINED) indices[i]++;
}

/* ---- Functions that return a number ---- */

EXPORTED double mpi_wtime_(void);
double mpi_wtime_(void) { return PMPI_Wtime(); }
EXPORTED double mpi_wtick_(void);
double mpi_wtick_(void) { return PMPI_Wtick(); }
EXPORTED MPI_Aint mpi_aint_add_(const MPI_Aint *base, const MPI_Aint *offset);
MPI_Aint mpi_aint_add_(const MPI_Aint *base, const MPI_Aint *offset) { return *base + *offset; }
EXPORTED MPI_Aint mpi_aint_diff_(const MPI_Aint *first, const MPI_Aint *second);
MPI_Aint mpi_aint_diff_(const MPI_Aint *first, const MPI_Aint *second) { return *first - *second; }
EXPORTED double pmpi_wtime_(void) __attribute__((alias("mpi_wtime_")));
EXPORTED double pmpi_wtick_(void) __attribute__((alias("mpi_wtick_")));
EXPORTED void mpi_pcontrol_(const MPI_Fint *level);
void mpi_pcontrol_(const MPI_Fint *level) { (void)level; }

/* The compiler believes that it may change the buffer; that is all. */
EXPORTED void mpi_f_sync_reg_(const void *buf);
void mpi_f_sync_reg_(const void *buf) { (void)buf; }

/* ---- Attributes ---- */

/* The old functions, whose values are of the size of an integer. */
EXPORTED void mpi_comm_set_attr_(MPI_Fint *comm, MPI_Fint *keyval, void **value, MPI_Fint *ierror);
EXPORTED void mpi_comm_get_attr_(MPI_Fint *comm, MPI_Fint *keyval, MPI_Aint *value, MPI_Fint *flag, MPI_Fint *ierror);
EXPORTED void mpi_attr_put_(MPI_Fint *comm, MPI_Fint *keyval, MPI_Fint *value, MPI_Fint *ierror);
void mpi_attr_put_(MPI_Fint *comm, MPI_Fint *keyval, MPI_Fint *value, MPI_Fint *ierror) {
    void *given = (void *)(intptr_t)*value;
    mpi_comm_set_attr_(comm, keyval, &given, ierror);
}
EXPORTED void mpi_attr_get_(MPI_Fint *comm, MPI_Fint *keyval, MPI_Fint *value, MPI_Fint *flag, MPI_Fint *ierror);
void mpi_attr_get_(MPI_Fint *comm, MPI_Fint *keyval, MPI_Fint *value, MPI_Fint *flag, MPI_Fint *ierror) {
    MPI_Aint found = *value;
    mpi_comm_get_attr_(comm, keyval, &found, flag, ierror);
    *value = (MPI_Fint)found;
}

/* The functions that a program names instead of its own. */
#define COPY_FN(name, copies)                                                                                        \
    EXPORTED void mpi_##name##_(MPI_Fint *of, MPI_Fint *keyval, void *extra, MPI_Aint *value, MPI_Aint *copied,      \
                                MPI_Fint *flag, MPI_Fint *ierror);                                                   \
    void mpi_##name##_(MPI_Fint *of, MPI_Fint *keyval, void *extra, MPI_Aint *value, MPI_Aint *copied,               \
                       MPI_Fint *flag, MPI_Fint *ierror) {                                                           \
        (void)of, (void)keyval, (void)extra;                                                                         \
        if (copies) *copied = *value;                                                                                \
        *flag = copies;                                                                                              \
        *ierror = MPI_SUCCESS;                                                                                       \
    }
#define DELETE_FN(name)                                                                                              \
    EXPORTED void mpi_##name##_(MPI_Fint *of, MPI_Fint *keyval, void *value, void *extra, MPI_Fint *ierror);         \
    void mpi_##name##_(MPI_Fint *of, MPI_Fint *keyval, void *value, void *extra, MPI_Fint *ierror) {                 \
        (void)of, (void)keyval, (void)value, (void)extra;                                                            \
        *ierror = MPI_SUCCESS;                                                                                       \
    }
COPY_FN(comm_dup_fn, 1)
COPY_FN(type_dup_fn, 1)
COPY_FN(win_dup_fn, 1)
COPY_FN(comm_null_copy_fn, 0)
COPY_FN(type_null_copy_fn, 0)
COPY_FN(win_null_copy_fn, 0)
DELETE_FN(comm_null_delete_fn)
DELETE_FN(type_null_delete_fn)
DELETE_FN(win_null_delete_fn)

/* ---- The rest ---- */

/* Fortran gets no address back. */
EXPORTED void mpi_buffer_detach_(void *buffer, MPI_Fint *size, MPI_Fint *ierror);
void mpi_buffer_detach_(void *buffer, MPI_Fint *size, MPI_Fint *ierror) {
    void *at;
    (void)buffer;
    tell(ierror, PMPI_Buffer_detach(&at, size));
}
OTHER_NAMES_OF_BUFFERS(buffer_detach, (void *buffer, MPI_Fint *size, MPI_Fint *ierror))

#endif
