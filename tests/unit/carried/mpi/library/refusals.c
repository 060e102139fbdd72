/* What a program may do, and what not: `refusals KIND` prints `answer` if each call that MPI forbids gives the class that
 * it names, to the error handler of the object that the call is about.
 */
#include <fcntl.h>
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static void check(int is_so, const char *what) {
    if (is_so) return;
    fprintf(stderr, "%s\n", what);
    exit(1);
}

static void expect_class(int error, int expected, const char *what) {
    int found;
    MPI_Error_class(error, &found);
    if (found == expected) return;
    fprintf(stderr, "%s: error class %d, expected %d\n", what, found, expected);
    exit(1);
}

/* ---- files: nothing sets a handler before the first of these; source: MPI 4.1, section 14.7 ---- */

static int num_handled;

static void handle(MPI_File *file, int *code, ...) {
    check(*file == MPI_FILE_NULL, "a file that is not open has no handle");
    *code = num_handled++ ? MPI_ERR_OTHER : MPI_SUCCESS;
}

/* Another process has locked the third byte, and changes it after a while. */
static void wait_for_the_byte_that_only_the_first_part_reaches(MPI_File file) {
    int ready[2];
    char told, found[9] = "";
    check(!pipe(ready), "a pipe");
    pid_t other = fork();
    if (other == 0) {
        int data = open("data", O_RDWR);
        struct flock third = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 2, .l_len = 1};
        int is_locked = !fcntl(data, F_SETLK, &third) && write(ready[1], "", 1) == 1;
        usleep(200000);
        _exit(is_locked && pwrite(data, "z", 1, 2) == 1 ? 0 : 1);
    }
    check(read(ready[0], &told, 1) == 1, "it is locked");
    check(!MPI_File_set_atomicity(file, 1), "accesses are atomic");
    check(!MPI_File_read_at(file, 0, found, 4, MPI_BYTE, MPI_STATUS_IGNORE), "read");
    check(!strcmp(found, "abzb"), "an atomic access waits for all bytes that its parts reach");
    check(waitpid(other, NULL, 0) == other, "the other has ended");
}

/* Parts of a view may lie over each other where nobody writes. Source: MPI 4.1, section 14.3. */
static void overlaps(void) {
    const int lengths[] = {3, 1}, places[] = {0, 1};
    char data[] = "abc", found[9] = "";
    MPI_Datatype type;
    MPI_File file;
    MPI_Type_indexed(2, lengths, places, MPI_BYTE, &type);
    MPI_Type_commit(&type);
    check(!MPI_File_open(MPI_COMM_WORLD, "data", MPI_MODE_CREATE | MPI_MODE_RDWR, MPI_INFO_NULL, &file), "opened");
    check(!MPI_File_write(file, data, 3, MPI_BYTE, MPI_STATUS_IGNORE), "written");
    int error = MPI_File_set_view(file, 0, MPI_BYTE, type, "native", MPI_INFO_NULL);
    expect_class(error, MPI_ERR_ARG, "parts over each other, of a file that is open for writing");
    MPI_File_close(&file);
    check(!MPI_File_open(MPI_COMM_WORLD, "data", MPI_MODE_RDONLY, MPI_INFO_NULL, &file), "opened");
    check(!MPI_File_set_view(file, 0, MPI_BYTE, type, "native", MPI_INFO_NULL), "parts over each other");
    check(!MPI_File_read(file, found, 4, MPI_BYTE, MPI_STATUS_IGNORE), "read");
    check(!strcmp(found, "abcb"), "what lies in two parts comes twice");
    wait_for_the_byte_that_only_the_first_part_reaches(file);
    MPI_File_close(&file);
    MPI_Type_free(&type);
}

static void files(void) {
    MPI_File file, null = MPI_FILE_NULL;
    MPI_Offset size;
    int error = MPI_File_open(MPI_COMM_WORLD, "not there", MPI_MODE_RDONLY, MPI_INFO_NULL, &file);
    expect_class(error, MPI_ERR_NO_SUCH_FILE, "opening returns its error, whatever the communicator's handler does");
    expect_class(MPI_File_delete("not there", MPI_INFO_NULL), MPI_ERR_NO_SUCH_FILE, "deleting returns its error");
    expect_class(MPI_File_get_size(null, &size), MPI_ERR_FILE, "a call on no file returns its error");
    expect_class(MPI_File_close(&null), MPI_ERR_FILE, "closing no file returns its error");
    /* Its name goes while it is open, so that closing it fails. */
    const char *name = "goes";
    int mode = MPI_MODE_CREATE | MPI_MODE_RDWR | MPI_MODE_DELETE_ON_CLOSE;
    check(!MPI_File_open(MPI_COMM_WORLD, name, mode, MPI_INFO_NULL, &file), "opened");
    check(!unlink(name), "removed");
    expect_class(MPI_File_close(&file), MPI_ERR_NO_SUCH_FILE, "closing returns its error, of a file that is over");
    check(file == MPI_FILE_NULL, "it is closed all the same");
    overlaps();
    MPI_Errhandler handler;
    MPI_File_create_errhandler(handle, &handler);
    MPI_File_set_errhandler(MPI_FILE_NULL, handler);
    MPI_Errhandler_free(&handler);
    error = MPI_File_open(MPI_COMM_WORLD, "not there", MPI_MODE_RDONLY, MPI_INFO_NULL, &file);
    expect_class(error, MPI_SUCCESS, "the call returns what the handler has left as its code");
    expect_class(MPI_File_get_size(null, &size), MPI_ERR_OTHER, "the call returns the code that the handler chose");
    check(num_handled == 2, "the handler of MPI_FILE_NULL gets errors of calls without a file");
}

/* ---- matched messages: the handler is that of their communicator, not the default one ---- */

static void messages(void) {
    int two[2] = {1, 2}, one = 0;
    MPI_Message message;
    MPI_Request sending, receiving;
    MPI_Status status;
    MPI_Comm comm;
    MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
    MPI_Isend(two, 2, MPI_INT, 0, 1, comm, &sending);
    MPI_Mprobe(0, 1, comm, &message, MPI_STATUS_IGNORE);
    expect_class(MPI_Mrecv(&one, 1, MPI_INT, &message, &status), MPI_ERR_TRUNCATE, "a matched message is too long");
    MPI_Wait(&sending, MPI_STATUS_IGNORE);
    MPI_Isend(two, 2, MPI_INT, 0, 1, comm, &sending);
    MPI_Mprobe(0, 1, comm, &message, MPI_STATUS_IGNORE);
    expect_class(MPI_Mrecv(&one, -1, MPI_INT, &message, &status), MPI_ERR_COUNT, "a count below zero");
    expect_class(MPI_Imrecv(&one, -1, MPI_INT, &message, &receiving), MPI_ERR_COUNT, "a count below zero, not waiting");
    MPI_Imrecv(two, 2, MPI_INT, &message, &receiving);
    MPI_Wait(&receiving, MPI_STATUS_IGNORE);
    MPI_Wait(&sending, MPI_STATUS_IGNORE);
    MPI_Comm_free(&comm);
}

/* ---- windows: epochs that do not go together; source: MPI 4.1, section 12.5 ---- */

static int memory[4];

static MPI_Win new_window(void) {
    MPI_Win win;
    MPI_Win_create(memory, sizeof memory, sizeof(int), MPI_INFO_NULL, MPI_COMM_WORLD, &win);
    MPI_Win_set_errhandler(win, MPI_ERRORS_RETURN);
    return win;
}

static int get(MPI_Win win) {
    static int result;
    return MPI_Get(&result, 1, MPI_INT, 0, 0, 1, MPI_INT, win);
}

static int lock(MPI_Win win) { return MPI_Win_lock(MPI_LOCK_SHARED, 0, 0, win); }

static void epochs(void) {
    MPI_Win win = new_window();
    MPI_Group world;
    MPI_Comm_group(MPI_COMM_WORLD, &world);

    check(!lock(win) && !get(win), "locked");
    expect_class(MPI_Win_free(&win), MPI_ERR_RMA_SYNC, "freeing what is locked");
    expect_class(MPI_Win_fence(0, win), MPI_ERR_RMA_SYNC, "a fence while locked");
    expect_class(MPI_Win_start(world, 0, win), MPI_ERR_RMA_SYNC, "an access epoch while locked");
    check(!MPI_Win_unlock(0, win), "unlocked");

    check(!MPI_Win_post(world, 0, win), "posted");
    expect_class(MPI_Win_free(&win), MPI_ERR_RMA_SYNC, "freeing what is exposed");
    expect_class(MPI_Win_fence(0, win), MPI_ERR_RMA_SYNC, "a fence while exposed");
    check(!MPI_Win_start(world, 0, win) && !get(win), "started");
    expect_class(lock(win), MPI_ERR_RMA_SYNC, "a lock in an access epoch");
    expect_class(MPI_Win_lock_all(0, win), MPI_ERR_RMA_SYNC, "all locks in an access epoch");
    expect_class(MPI_Win_free(&win), MPI_ERR_RMA_SYNC, "freeing what is accessed");
    check(!MPI_Win_complete(win) && !MPI_Win_wait(win), "completed");

    check(!MPI_Win_fence(0, win), "fenced");
    check(!lock(win) && !get(win) && !MPI_Win_unlock(0, win), "a fence after which nothing was accessed ends there");
    expect_class(get(win), MPI_ERR_RMA_SYNC, "an access after its epoch");
    check(!MPI_Win_fence(0, win) && !get(win), "fenced");
    expect_class(lock(win), MPI_ERR_RMA_SYNC, "a lock in a fence's epoch");
    expect_class(MPI_Win_lock_all(0, win), MPI_ERR_RMA_SYNC, "all locks in a fence's epoch");
    expect_class(MPI_Win_start(world, 0, win), MPI_ERR_RMA_SYNC, "an access epoch in a fence's");
    check(!MPI_Win_fence(0, win) && !lock(win) && !MPI_Win_unlock(0, win), "the next fence ends it");

    /* What fails is told when the window is over. */
    check(!MPI_Win_fence(0, win), "fenced");
    check(!MPI_Put(memory, 1, MPI_INT, 0, 100, 1, MPI_INT, win), "begun");
    expect_class(MPI_Win_free(&win), MPI_ERR_RMA_RANGE, "freeing tells of an access that failed");
    check(win == MPI_WIN_NULL, "it is freed all the same");
    MPI_Group_free(&world);
}

/* ---- compare and swap: which types may be compared ---- */

static void types(void) {
    MPI_Win win = new_window();
    MPI_Datatype derived;
    long double one[2] = {0}, two[2] = {0}, result[2];
    MPI_Type_contiguous(4, MPI_BYTE, &derived);
    MPI_Type_commit(&derived);
    const MPI_Datatype refused[] = {MPI_FLOAT, MPI_DOUBLE, MPI_LONG_DOUBLE, MPI_C_COMPLEX, MPI_2INT, MPI_DOUBLE_INT, derived};
    const MPI_Datatype taken[] = {MPI_INT, MPI_UNSIGNED_LONG, MPI_SIGNED_CHAR, MPI_CHAR, MPI_BYTE, MPI_C_BOOL, MPI_AINT,
                                  MPI_COUNT, MPI_OFFSET};
    MPI_Win_fence(0, win);
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        expect_class(MPI_Compare_and_swap(one, two, result, refused[i], 0, 0, win), MPI_ERR_TYPE, "comparing");
    for (size_t i = 0; i < sizeof taken / sizeof *taken; i++)
        check(!MPI_Compare_and_swap(one, two, result, taken[i], 0, 0, win), "a type that may be compared");
    MPI_Win_fence(0, win);
    MPI_Win_free(&win);
    MPI_Type_free(&derived);
}

/* ---- accumulate: values that the real MPI does not fold ---- */

typedef struct {
    long double value;
    int index;
} Pair;

static void values(void) {
    Pair pairs[3] = {{1, 1}, {2, 2}, {3, 3}}, more[3] = {{2, 7}, {2, 1}, {2, 0}};
    MPI_Win win;
    MPI_Win_create(pairs, sizeof pairs, sizeof(Pair), MPI_INFO_NULL, MPI_COMM_WORLD, &win);
    MPI_Win_fence(0, win);
    MPI_Accumulate(more, 3, MPI_LONG_DOUBLE_INT, 0, 0, 3, MPI_LONG_DOUBLE_INT, MPI_MAXLOC, win);
    MPI_Win_fence(0, win);
    check(pairs[0].value == 2 && pairs[0].index == 7, "a larger value comes with its index");
    check(pairs[1].value == 2 && pairs[1].index == 1, "of equal values the smaller index stays");
    check(pairs[2].value == 3 && pairs[2].index == 3, "a smaller value does not come");
    MPI_Win_free(&win);

    MPI_Datatype logical = MPI_Type_f2c(MPI_Type_c2f(MPI_LOGICAL));
    int flags[4] = {0, 0, 1, 1}, others[4] = {0, 1, 0, 1};
    MPI_Win_create(flags, sizeof flags, sizeof(int), MPI_INFO_NULL, MPI_COMM_WORLD, &win);
    MPI_Win_fence(0, win);
    MPI_Accumulate(others, 4, logical, 0, 0, 4, logical, MPI_LXOR, win);
    MPI_Win_fence(0, win);
    check(!flags[0] && flags[1] && flags[2] && !flags[3], "logical values of Fortran");
    MPI_Win_free(&win);
}

/* ---- arguments: places for results, and what a call that fails leaves there ---- */

static int fails(MPI_Comm comm, int keyval, void *extra, void *value, void *copy, int *flag) {
    (void)comm, (void)keyval, (void)value, (void)copy, (void)flag;
    return *(int *)extra;
}

static int frees(MPI_Comm comm, int keyval, void *value, void *extra) {
    (void)comm, (void)value, (void)extra;
    return MPI_Comm_free_keyval(&keyval);
}

static void arguments(void) {
    /* Programs of before MPI 4.0 set no other handler for errors of calls that have no object. */
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Group world;
    MPI_Comm_group(MPI_COMM_WORLD, &world);
    MPI_Comm comm = MPI_COMM_WORLD;
    MPI_Datatype type = MPI_INT;
    MPI_Request request = MPI_REQUEST_NULL;
    expect_class(MPI_Type_size(MPI_INT, NULL), MPI_ERR_ARG, "no place for a number");
    expect_class(MPI_Comm_dup(MPI_COMM_WORLD, NULL), MPI_ERR_ARG, "no place for a communicator");
    expect_class(MPI_Comm_free(NULL), MPI_ERR_ARG, "no communicator to free");
    expect_class(MPI_Group_union(world, world, NULL), MPI_ERR_ARG, "no place for a group");
    int zero = 0;
    expect_class(MPI_Group_translate_ranks(world, 1, &zero, world, NULL), MPI_ERR_ARG, "no place for ranks");
    expect_class(MPI_Group_translate_ranks(world, 1, NULL, world, &zero), MPI_ERR_ARG, "no ranks");
    check(!MPI_Group_translate_ranks(world, 0, NULL, world, NULL), "none of no ranks");
    expect_class(MPI_Type_indexed(1, &zero, NULL, MPI_INT, &type), MPI_ERR_ARG, "no displacements");
    expect_class(MPI_Startall(1, NULL), MPI_ERR_ARG, "no requests");
    check(!MPI_Startall(0, NULL), "none of no requests");
    expect_class(MPI_Type_contiguous(-1, MPI_INT, &type), MPI_ERR_COUNT, "a count below zero");
    check(type == MPI_DATATYPE_NULL, "a type that was not made is null");
    request = (MPI_Request)(intptr_t)1;
    expect_class(MPI_Isend(&comm, -1, MPI_INT, 0, 0, MPI_COMM_WORLD, &request), MPI_ERR_COUNT, "a count below zero");
    check(request == MPI_REQUEST_NULL, "a request that was not made is null");

    /* A keyval may be freed again while attributes stand under it, also by its own function. */
    int keyval, again, own_class, code, length;
    char text[MPI_MAX_ERROR_STRING];
    MPI_Comm one;
    MPI_Comm_dup(MPI_COMM_WORLD, &one);
    MPI_Comm_create_keyval(NULL, frees, &keyval, NULL);
    again = keyval;
    check(!MPI_Comm_set_attr(one, keyval, NULL) && !MPI_Comm_free_keyval(&keyval), "freed");
    check(!MPI_Comm_free_keyval(&again) && again == MPI_KEYVAL_INVALID, "freed again");
    check(!MPI_Comm_free(&one), "its function frees it once more");

    /* What a callback returns is the error, and its text is the program's alone. */
    MPI_Add_error_class(&own_class);
    MPI_Add_error_code(own_class, &code);
    MPI_Add_error_string(code, "its own words");
    MPI_Comm_create_keyval(fails, NULL, &keyval, &code);
    MPI_Comm_set_attr(MPI_COMM_WORLD, keyval, NULL);
    comm = MPI_COMM_SELF;
    check(MPI_Comm_dup(MPI_COMM_WORLD, &comm) == code && comm == MPI_COMM_NULL, "a copy that was not made is null");
    check(!MPI_Error_string(code, text, &length) && !strcmp(text, "its own words"), "the program's text");
    MPI_Comm_delete_attr(MPI_COMM_WORLD, keyval);
    MPI_Comm_free_keyval(&keyval);
    MPI_Group_free(&world);
}

/* ---- buffers: what is sent is not where results come; Open MPI lets that pass ---- */

static void buffers(void) {
#if !defined(FACE_OPENMPI)
    int here[4] = {1, 2, 3, 4}, zero = 0;
    MPI_Datatype type = MPI_INT;
    MPI_Comm comm;
    MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
    MPI_Comm_set_errhandler(MPI_COMM_SELF, MPI_ERRORS_RETURN);
    expect_class(MPI_Allreduce(here, here, 1, MPI_INT, MPI_SUM, comm), MPI_ERR_BUFFER, "allreduce");
    expect_class(MPI_Reduce(here, here, 1, MPI_INT, MPI_SUM, 0, comm), MPI_ERR_BUFFER, "reduce");
    expect_class(MPI_Exscan(here, here, 1, MPI_INT, MPI_SUM, comm), MPI_ERR_BUFFER, "exscan");
    expect_class(MPI_Reduce_scatter_block(here, here, 1, MPI_INT, MPI_SUM, comm), MPI_ERR_BUFFER, "reduce_scatter");
    expect_class(MPI_Reduce_local(here, here, 1, MPI_INT, MPI_SUM), MPI_ERR_BUFFER, "reduce_local");
    expect_class(MPI_Reduce_local(MPI_IN_PLACE, here, 1, MPI_INT, MPI_SUM), MPI_ERR_BUFFER, "reduce_local in place");
    expect_class(MPI_Gather(here, 1, MPI_INT, here, 1, MPI_INT, 0, comm), MPI_ERR_BUFFER, "gather");
    expect_class(MPI_Scatter(here, 1, MPI_INT, here, 1, MPI_INT, 0, comm), MPI_ERR_BUFFER, "scatter");
    expect_class(MPI_Allgather(here, 1, MPI_INT, here, 1, MPI_INT, comm), MPI_ERR_BUFFER, "allgather");
    expect_class(MPI_Alltoall(here, 1, MPI_INT, here, 1, MPI_INT, comm), MPI_ERR_BUFFER, "alltoall");
    int count = 1;
    int error = MPI_Alltoallw(here, &count, &zero, &type, here, &count, &zero, &type, comm);
    expect_class(error, MPI_ERR_BUFFER, "alltoallw");
    check(!MPI_Allreduce(here, here, 0, MPI_INT, MPI_SUM, comm), "of nothing nothing is shared");
    MPI_Comm_free(&comm);
#endif
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    const char *kind = argv[1];
    if (!strcmp(kind, "files")) files();
    else if (!strcmp(kind, "messages")) messages();
    else if (!strcmp(kind, "epochs")) epochs();
    else if (!strcmp(kind, "values")) values();
    else if (!strcmp(kind, "arguments")) arguments();
    else if (!strcmp(kind, "buffers")) buffers();
    else types();
    MPI_Finalize();
    puts("answer");
    return 0;
}
