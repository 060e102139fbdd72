/* Attributes, infos, groups, null handles, and the datatypes that Fortran asks for: prints `answer` if all is as the standard says. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int num_checked;

static void check(int is_so, const char *what) {
    num_checked++;
    if (is_so) return;
    fprintf(stderr, "%s\n", what);
    exit(1);
}

/* ---- attributes ---- */

static char story[64];

static int copied(MPI_Datatype type, int keyval, void *extra, void *value, void *copy, int *flag) {
    (void)type, (void)keyval;
    strcat(story, extra);
    *(void **)copy = value;
    *flag = *(char *)extra != 'b';
    return MPI_SUCCESS;
}

static int deleted(MPI_Datatype type, int keyval, void *value, void *extra) {
    (void)type, (void)keyval, (void)value;
    strcat(story, "-");
    strcat(story, extra);
    return MPI_SUCCESS;
}

static void attributes(void) {
    int keys[3], flag, one = 1;
    void *value;
    MPI_Datatype type, copy;
    MPI_Type_contiguous(2, MPI_INT, &type);
    static char *const names[] = {"a", "b", "c"};
    for (int i = 0; i < 3; i++) MPI_Type_create_keyval(copied, deleted, &keys[i], names[i]);
    for (int i = 0; i < 3; i++) MPI_Type_set_attr(type, keys[i], &one);
    MPI_Type_dup(type, &copy);
    check(!strcmp(story, "abc"), "attributes are copied in the order in which they were set");
    MPI_Type_get_attr(copy, keys[1], &value, &flag);
    check(!flag, "what the copy function keeps back is not there");
    MPI_Type_get_attr(copy, keys[2], &value, &flag);
    check(flag && value == &one, "what it lets through is there");
    MPI_Type_free(&copy);
    check(!strcmp(story, "abc-c-a"), "the newest is deleted first");
    int freed = keys[0];
    MPI_Type_free_keyval(&keys[0]);
    check(keys[0] == MPI_KEYVAL_INVALID, "a freed keyval is none");
    check(MPI_Type_set_attr(type, freed, &one) != MPI_SUCCESS, "nothing is set under it");
    MPI_Type_free(&type);
    check(!strcmp(story, "abc-c-a-c-b-a"), "what stands under it is deleted all the same");
    int *tag_ub;
    MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &tag_ub, &flag);
    check(flag && *tag_ub >= 32767, "MPI_TAG_UB");
    check(MPI_Comm_set_attr(MPI_COMM_WORLD, MPI_TAG_UB, &one) != MPI_SUCCESS, "predefined attributes stay");
}

/* As the libraries set and ask for attributes that Fortran programs of a face bring along. */
#if defined(FACE_MPICH)
enum { AS_ADDRESS = 1 };
int MPII_Type_set_attr(MPI_Datatype type, int keyval, void *value, int as);
int MPII_Type_get_attr(MPI_Datatype type, int keyval, void *value, int *flag, int as);
static void set_in_fortran(MPI_Datatype type, int keyval, MPI_Aint value) {
    MPII_Type_set_attr(type, keyval, (void *)value, AS_ADDRESS);
}
static MPI_Aint get_in_fortran(MPI_Datatype type, int keyval) {
    MPI_Aint value;
    int flag;
    MPII_Type_get_attr(type, keyval, &value, &flag, AS_ADDRESS);
    return value;
}
#elif defined(FACE_OPENMPI)
void mpi_type_set_attr_(MPI_Fint *type, MPI_Fint *keyval, MPI_Aint *value, MPI_Fint *ierror);
void mpi_type_get_attr_(MPI_Fint *type, MPI_Fint *keyval, MPI_Aint *value, MPI_Fint *flag, MPI_Fint *ierror);
static void set_in_fortran(MPI_Datatype type, int keyval, MPI_Aint value) {
    MPI_Fint number = MPI_Type_c2f(type), error;
    mpi_type_set_attr_(&number, &keyval, &value, &error);
}
static MPI_Aint get_in_fortran(MPI_Datatype type, int keyval) {
    MPI_Fint number = MPI_Type_c2f(type), error, flag;
    MPI_Aint value;
    mpi_type_get_attr_(&number, &keyval, &value, &flag, &error);
    return value;
}
#endif

#if defined(FACE_MPICH) || defined(FACE_OPENMPI)
static int handed_on(MPI_Datatype type, int keyval, void *extra, void *value, void *copy, int *flag) {
    (void)type, (void)keyval, (void)extra;
    *(void **)copy = value;
    *flag = 1;
    return MPI_SUCCESS;
}

static int counted(MPI_Datatype type, int keyval, void *value, void *extra) {
    (void)type, (void)keyval;
    *(MPI_Aint *)extra += *(MPI_Aint *)value;
    return MPI_SUCCESS;
}

static void attributes_of_two_languages(void) {
    int key, flag, one = 1;
    void *value;
    MPI_Aint sum = 0;
    MPI_Datatype type, copy;
    MPI_Type_contiguous(2, MPI_INT, &type);
    MPI_Type_create_keyval(handed_on, counted, &key, &sum);
    set_in_fortran(type, key, -5555);
    MPI_Type_get_attr(type, key, &value, &flag);
    check(flag && *(MPI_Aint *)value == -5555, "what Fortran has set is in C the address of it");
    check(get_in_fortran(type, key) == -5555, "and in Fortran the number");
    MPI_Type_dup(type, &copy);
    MPI_Type_free(&type);
    check(sum == -5555, "a delete function of C gets its address");
    MPI_Type_get_attr(copy, key, &value, &flag);
    check(flag && *(MPI_Aint *)value == -5555 && get_in_fortran(copy, key) == -5555, "the copy has it when it is gone");
    MPI_Type_delete_attr(copy, key);
    MPI_Type_free_keyval(&key);
    MPI_Type_create_keyval(NULL, NULL, &key, NULL);
    MPI_Type_set_attr(copy, key, &one);
    check(get_in_fortran(copy, key) == (MPI_Aint)&one, "what C has set is in Fortran the address as a number");
    MPI_Type_free(&copy);
    MPI_Type_free_keyval(&key);
}
#endif

/* ---- infos ---- */

static void hints(void) {
    MPI_Comm comm;
    MPI_Info info;
    char value[MPI_MAX_INFO_VAL + 1];
    int flag;
    MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    MPI_Info_create(&info);
    MPI_Info_set(info, "mpi_assert_no_any_tag", "true");
    MPI_Comm_set_info(comm, info);
    MPI_Info_delete(info, "mpi_assert_no_any_tag");
    MPI_Info_set(info, "mpi_assert_exact_length", "true");
    MPI_Comm_set_info(comm, info);
    MPI_Info_free(&info);
    MPI_Comm_get_info(comm, &info);
    MPI_Info_get(info, "mpi_assert_no_any_tag", MPI_MAX_INFO_VAL, value, &flag);
    check(flag && !strcmp(value, "true"), "a hint that is not given again stays");
    MPI_Info_get(info, "mpi_assert_exact_length", MPI_MAX_INFO_VAL, value, &flag);
    check(flag, "one that is given is added");
    MPI_Info_free(&info);
    MPI_Comm_free(&comm);
}

static void infos(void) {
    MPI_Info info, copy;
    char value[MPI_MAX_INFO_VAL + 1], key[MPI_MAX_INFO_KEY + 1];
    int flag, count, length;
    MPI_Info_create(&info);
    MPI_Info_set(info, "first", "1");
    MPI_Info_set(info, "second", "a longer value");
    MPI_Info_set(info, "first", "one");
    MPI_Info_dup(info, &copy);
    MPI_Info_delete(info, "first");
    MPI_Info_get_nkeys(copy, &count);
    MPI_Info_get_nthkey(copy, 0, key);
    check(count == 2 && !strcmp(key, "first"), "keys stand in the order in which they were set");
    MPI_Info_get(copy, "second", 3, value, &flag);
    check(flag && !strcmp(value, "a l"), "a value is cut");
    length = 4;
    MPI_Info_get_string(copy, "second", &length, value, &flag);
    check(flag && !strcmp(value, "a l") && length == 15, "a string is cut with its end, and its room is told");
    MPI_Info_get_valuelen(info, "second", &length, &flag);
    check(flag && length == 14, "length of a value");
    check(MPI_Info_delete(info, "first") != MPI_SUCCESS, "a key that is not there");
    MPI_Info_get(MPI_INFO_ENV, "no such key", 3, value, &flag);
    check(!flag, "no value");
    MPI_Info_free(&info);
    MPI_Info_free(&copy);
    check(info == MPI_INFO_NULL, "a freed info is null");
}

/* ---- groups ---- */

static void groups(void) {
    MPI_Group all, none, both;
    int rank, size, result, ranges[1][3] = {{0, 0, 1}}, first = 0, found;
    MPI_Comm_group(MPI_COMM_WORLD, &all);
    MPI_Group_range_excl(all, 1, ranges, &none);
    check(none == MPI_GROUP_EMPTY, "a group of nobody is MPI_GROUP_EMPTY");
    MPI_Group_union(none, all, &both);
    MPI_Group_compare(all, both, &result);
    check(result == MPI_IDENT, "union with nobody");
    MPI_Group_rank(both, &rank);
    MPI_Group_size(none, &size);
    check(rank == 0 && size == 0, "rank and size");
    MPI_Group_translate_ranks(all, 1, &first, none, &found);
    check(found == MPI_UNDEFINED, "nobody has no rank");
    ranges[0][2] = 0;
    check(MPI_Group_range_incl(all, 1, ranges, &none) != MPI_SUCCESS, "a stride of 0");
    MPI_Group_free(&both);
    MPI_Group_free(&all);
}

/* ---- datatypes ---- */

static void fortran_types(void) {
    MPI_Datatype real, again, matched;
    int size, ints[2], num_ints, num_addresses, num_types, combiner;
    MPI_Type_create_f90_real(12, MPI_UNDEFINED, &real);
    MPI_Type_create_f90_real(12, MPI_UNDEFINED, &again);
    MPI_Type_size(real, &size);
    check(size == 8 && real == again, "the same type for the same precision");
    MPI_Type_get_envelope(real, &num_ints, &num_addresses, &num_types, &combiner);
    MPI_Type_get_contents(real, 2, 0, 0, ints, NULL, NULL);
    check(combiner == MPI_COMBINER_F90_REAL && num_ints == 2 && ints[0] == 12 && ints[1] == MPI_UNDEFINED, "contents");
    check(MPI_Type_free(&real) != MPI_SUCCESS, "it is not the program's to free");
    MPI_Type_match_size(MPI_TYPECLASS_COMPLEX, 16, &matched);
    check(matched == MPI_COMPLEX16, "match of a size");
    check(MPI_Type_match_size(MPI_TYPECLASS_REAL, 3, &matched) != MPI_SUCCESS, "a size that there is not");
}

static void freed_parts(void) {
    MPI_Datatype pair, row, part;
    int count, size;
    MPI_Type_contiguous(2, MPI_INT, &pair);
    MPI_Type_contiguous(3, pair, &row);
    MPI_Type_free(&pair);
    MPI_Type_get_contents(row, 1, 0, 1, &count, NULL, &part);
    MPI_Type_size(part, &size);
    check(count == 3 && size == 8, "what a type was made of lives on when its handle is freed");
    MPI_Type_free(&part);
    MPI_Type_free(&row);
}

/* Datatypes that not every face has. */
static void rare_types(void) {
    int size = 2;
#ifdef MPIX_SHORT_FLOAT
    MPI_Type_size(MPIX_SHORT_FLOAT, &size);
#endif
    check(size == 2, "a short float");
#ifdef MPI_UB
    int lengths[] = {1, 1, 1};
    MPI_Aint places[] = {-8, 0, 24}, lower, extent;
    MPI_Datatype parts[] = {MPI_LB, MPI_INT, MPI_UB}, marked;
    check(MPI_Type_create_struct(3, lengths, places, parts, &marked) == MPI_SUCCESS, "marks of MPI 1");
    MPI_Type_get_extent(marked, &lower, &extent);
    MPI_Type_size(marked, &size);
    check(lower == -8 && extent == 32 && size == 4, "marks bound a struct, and are no data");
    MPI_Type_free(&marked);
#endif
}

/* ---- null handles ---- */

/* The way of a null handle to Fortran and back. */
#define IS_NULL_IN_FORTRAN(Type, NULL_HANDLE) \
    check(MPI_##Type##_f2c(MPI_##Type##_c2f(NULL_HANDLE)) == NULL_HANDLE, #NULL_HANDLE " is null in Fortran, too")

static void null_handles(void) {
    IS_NULL_IN_FORTRAN(Comm, MPI_COMM_NULL);
    IS_NULL_IN_FORTRAN(Type, MPI_DATATYPE_NULL);
    IS_NULL_IN_FORTRAN(Errhandler, MPI_ERRHANDLER_NULL);
    IS_NULL_IN_FORTRAN(File, MPI_FILE_NULL);
    IS_NULL_IN_FORTRAN(Group, MPI_GROUP_NULL);
    IS_NULL_IN_FORTRAN(Info, MPI_INFO_NULL);
    IS_NULL_IN_FORTRAN(Message, MPI_MESSAGE_NULL);
    IS_NULL_IN_FORTRAN(Op, MPI_OP_NULL);
    IS_NULL_IN_FORTRAN(Request, MPI_REQUEST_NULL);
    IS_NULL_IN_FORTRAN(Session, MPI_SESSION_NULL);
    IS_NULL_IN_FORTRAN(Win, MPI_WIN_NULL);
    int code = MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRHANDLER_NULL), its_class;
    MPI_Error_class(code, &its_class);
    check(its_class == MPI_ERR_ERRHANDLER && its_class != MPI_ERR_OTHER, "no error handler is a wrong argument");
}

/* Data that programs name, as MPICH's header has them. */
static void named_data(void) {
#if defined(FACE_MPICH)
    extern void *const MPI_T_PVAR_ALL_HANDLES;
    check(MPI_T_PVAR_ALL_HANDLES != NULL, "all handles of a performance variable");
#endif
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
    attributes();
#if defined(FACE_MPICH) || defined(FACE_OPENMPI)
    attributes_of_two_languages();
#endif
    hints();
    infos();
    groups();
    fortran_types();
    freed_parts();
    rare_types();
    null_handles();
    named_data();
    MPI_Finalize();
    printf("answer %d\n", num_checked);
    return 0;
}
