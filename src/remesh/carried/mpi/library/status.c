/* Statuses: what a program reads from them and writes into them, and their forms in Fortran. */
#include "datatype.h"

#define CHECK_STATUS(status)                                                                                      \
    do {                                                                                                          \
        if ((status) == MPI_STATUS_IGNORE) return fail(MPI_ERR_ARG, "the status is MPI_STATUS_IGNORE");           \
    } while (0)

int do_Get_count(const MPI_Status *status, Datatype *datatype, MPI_Count *count) {
    CHECK_STATUS(status);
    int64_t num_bytes = status_bytes(status);
    if (datatype->size == 0) *count = num_bytes == 0 ? 0 : MPI_UNDEFINED;
    else *count = num_bytes % datatype->size == 0 ? num_bytes / datatype->size : MPI_UNDEFINED;
    return MPI_SUCCESS;
}

int do_Get_elements(const MPI_Status *status, Datatype *datatype, MPI_Count *count) {
    CHECK_STATUS(status);
    *count = count_values(datatype, status_bytes(status));
    return MPI_SUCCESS;
}

int do_Get_elements_x(const MPI_Status *status, Datatype *datatype, MPI_Count *count) {
    return do_Get_elements(status, datatype, count);
}

int do_Test_cancelled(const MPI_Status *status, int *flag) {
    CHECK_STATUS(status);
    *flag = status_cancelled(status);
    return MPI_SUCCESS;
}

int do_Status_get_source(const MPI_Status *status, int *source) {
    CHECK_STATUS(status);
    *source = status->MPI_SOURCE;
    return MPI_SUCCESS;
}

int do_Status_get_tag(const MPI_Status *status, int *tag) {
    CHECK_STATUS(status);
    *tag = status->MPI_TAG;
    return MPI_SUCCESS;
}

int do_Status_get_error(const MPI_Status *status, int *err) {
    CHECK_STATUS(status);
    *err = status->MPI_ERROR;
    return MPI_SUCCESS;
}

/* ---- Written by the program ---- */

int do_Status_set_source(MPI_Status *status, int source) {
    CHECK_STATUS(status);
    status->MPI_SOURCE = source;
    return MPI_SUCCESS;
}

int do_Status_set_tag(MPI_Status *status, int tag) {
    CHECK_STATUS(status);
    status->MPI_TAG = tag;
    return MPI_SUCCESS;
}

int do_Status_set_error(MPI_Status *status, int err) {
    CHECK_STATUS(status);
    status->MPI_ERROR = err;
    return MPI_SUCCESS;
}

int do_Status_set_cancelled(MPI_Status *status, int flag) {
    CHECK_STATUS(status);
    set_status(status, status->MPI_SOURCE, status->MPI_TAG, status_bytes(status), flag != 0);
    return MPI_SUCCESS;
}

/* Bytes of packed data that hold so many basic values: the inverse of count_values(). */
static int64_t bytes_of_values(const Datatype *type, MPI_Count count) {
    MPI_Count in_one = count_values(type, type->size);
    if (in_one <= 0) return 0;
    int64_t whole = count / in_one * type->size, rest = 0;
    while (rest < type->size && count_values(type, rest) != count % in_one) rest++;
    return whole + rest;
}

int do_Status_set_elements(MPI_Status *status, Datatype *datatype, MPI_Count count) {
    CHECK_STATUS(status);
    set_status(status, status->MPI_SOURCE, status->MPI_TAG, bytes_of_values(datatype, count), status_cancelled(status));
    return MPI_SUCCESS;
}

int do_Status_set_elements_x(MPI_Status *status, Datatype *datatype, MPI_Count count) {
    return do_Status_set_elements(status, datatype, count);
}

/* ---- In Fortran: the same words, as integers ---- */

static int copy_words(void *to, const void *from) {
    if (from == NULL || from == (const void *)MPI_STATUS_IGNORE) return fail(MPI_ERR_ARG,
                                                                             "there is no status to be converted");
    memcpy(to, from, sizeof(MPI_Status));
    return MPI_SUCCESS;
}

int do_Status_c2f(const MPI_Status *c_status, MPI_Fint *f_status) { return copy_words(f_status, c_status); }
int do_Status_f2c(const MPI_Fint *f_status, MPI_Status *c_status) { return copy_words(c_status, f_status); }
int do_Status_c2f08(const MPI_Status *c_status, MPI_F08_status *f08_status) { return copy_words(f08_status, c_status); }
int do_Status_f082c(const MPI_F08_status *f08_status, MPI_Status *c_status) { return copy_words(c_status, f08_status); }
int do_Status_f2f08(const MPI_Fint *f_status, MPI_F08_status *f08_status) { return copy_words(f08_status, f_status); }
int do_Status_f082f(const MPI_F08_status *f08_status, MPI_Fint *f_status) { return copy_words(f_status, f08_status); }
