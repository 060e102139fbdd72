/* What is done to a file as a whole: opening, closing, its size, its view, and where its pointers are. */
#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "channel.h"
#include "entry.h"
#include "errors.h"
#include "exchange.h"
#include "group.h"
#include "info.h"

/* ---- errors of the system ---- */

static int class_of_errno(int error) {
    switch (error) {
    case ENOENT: return MPI_ERR_NO_SUCH_FILE;
    case EEXIST: return MPI_ERR_FILE_EXISTS;
    case EACCES: case EPERM: return MPI_ERR_ACCESS;
    case EROFS: return MPI_ERR_READ_ONLY;
    case ENOSPC: case EFBIG: return MPI_ERR_NO_SPACE;
    case EDQUOT: return MPI_ERR_QUOTA;
    case EBUSY: case ETXTBSY: return MPI_ERR_FILE_IN_USE;
    case ENOTDIR: case EISDIR: case ELOOP: case ENAMETOOLONG: return MPI_ERR_BAD_FILE;
    default: return MPI_ERR_IO;
    }
}

int fail_of_system(const char *call, const char *path, int error) {
    return fail(class_of_errno(error), "%s on %s: %s", call, path, strerror(error));
}

int expect_random_access(const File *file, const char *call) {
    if (!(file->amode & MPI_MODE_SEQUENTIAL)) return MPI_SUCCESS;
    return fail(MPI_ERR_UNSUPPORTED_OPERATION, "%s: %s is open with MPI_MODE_SEQUENTIAL; use the shared pointer", call,
                file->path);
}

/* MPI_ERR_NOT_SAME on all ranks unless all give the same value. */
static int expect_same(Comm *comm, int64_t value, const char *what) {
    int64_t first = value;
    TRY(broadcast(comm, 0, &first, sizeof first));
    bool is_same = first == value;
    return agree(comm, is_same ? MPI_SUCCESS : fail(MPI_ERR_NOT_SAME, "%s is %lld on rank 0 and %lld on rank %d", what,
                                                    (long long)first, (long long)value, comm->rank));
}

/* ---- opening; source: MPI 4.1, section 14.2.1 ---- */

static int check_amode(int amode) {
    int ways = !!(amode & MPI_MODE_RDONLY) + !!(amode & MPI_MODE_WRONLY) + !!(amode & MPI_MODE_RDWR);
    if (ways != 1) return fail(MPI_ERR_AMODE, "mode %d has %d of RDONLY, WRONLY and RDWR; give one", amode, ways);
    if (amode & MPI_MODE_RDONLY && amode & (MPI_MODE_CREATE | MPI_MODE_EXCL))
        return fail(MPI_ERR_AMODE, "CREATE and EXCL do not go with RDONLY; open it for writing");
    if (amode & MPI_MODE_RDWR && amode & MPI_MODE_SEQUENTIAL)
        return fail(MPI_ERR_AMODE, "SEQUENTIAL does not go with RDWR; open it for one of both");
    return MPI_SUCCESS;
}

static int open_here(const char *path, int amode, int *descriptor) {
    int flags = amode & MPI_MODE_RDONLY ? O_RDONLY : amode & MPI_MODE_WRONLY ? O_WRONLY : O_RDWR;
    if (amode & MPI_MODE_CREATE) flags |= O_CREAT | (amode & MPI_MODE_EXCL ? O_EXCL : 0);
    struct stat status;
    enter_gate();
    *descriptor = open(path, flags | O_CLOEXEC, 0666);
    int error = *descriptor < 0 || fstat(*descriptor, &status) ? errno : S_ISDIR(status.st_mode) ? EISDIR : 0;
    if (error && *descriptor >= 0) close(*descriptor);
    leave_gate();
    if (!error) return MPI_SUCCESS;
    *descriptor = -1;
    return fail_of_system("opening", path, error);
}

static void close_quietly(int descriptor) {
    if (descriptor < 0) return;
    enter_gate();
    close(descriptor);
    leave_gate();
}

/* This rank's descriptor; the first rank makes the file, if the mode says so, before the others open it. */
static int open_everywhere(Comm *comm, const char *path, int amode, int *descriptor) {
    int error = comm->rank == 0 ? open_here(path, amode, descriptor) : MPI_SUCCESS;
    TRY(agree(comm, error));
    if (comm->rank != 0) error = open_here(path, amode & ~(MPI_MODE_CREATE | MPI_MODE_EXCL), descriptor);
    error = agree(comm, error);
    if (error) close_quietly(*descriptor);
    return error;
}

static int64_t size_of(const File *file, int *error) {
    struct stat status = {0};
    enter_gate();
    *error = fstat(file->descriptor, &status) ? errno : 0;
    leave_gate();
    return status.st_size;
}

static void destroy_file(void *object) {
    File *file = object;
    close_quietly(file->descriptor);
    drop_view(&file->view);
    let_go(file->etype);
    let_go(file->filetype);
    let_go(file->info);
    free_handle(file->comm);
    free(file->path);
}

static int take_view(File *file, int64_t displacement, Datatype *etype, Datatype *filetype) {
    View view;
    TRY(make_view(displacement, etype, filetype, !!(file->amode & MPI_MODE_RDONLY), &view));
    drop_view(&file->view);
    file->view = view;
    keep(etype), keep(filetype);
    let_go(file->etype), let_go(file->filetype);
    file->etype = etype, file->filetype = filetype;
    return MPI_SUCCESS;
}

static int begin_file(File *file) {
    int error = MPI_SUCCESS;
    Datatype *byte = datatype_of(MPI_BYTE);
    if (file->amode & MPI_MODE_APPEND) file->position = file->shared = size_of(file, &error);
    error = error ? fail_of_system("opening", file->path, error) : take_view(file, 0, byte, byte);
    if (!error) error = make_shared_pointer(file);
    /* The shared pointer is there, and nobody writes before all have seen where the end is. */
    return agree(file->comm, error);
}

int do_File_open(Comm *comm, const char *filename, int amode, Info *info, File **fh) {
    if (comm->remote) return fail(MPI_ERR_COMM, "opening %s on an intercommunicator; give one of a single group", filename);
    Comm *own;
    int descriptor = -1;
    TRY(duplicate_for_library(comm, &own));
    int error = expect_same(own, amode, "the access mode");
    if (!error) error = check_amode(amode);
    if (!error) error = open_everywhere(own, filename, amode, &descriptor);
    if (error) {
        free_handle(own);
        return error;
    }
    set_destructor(KIND_FILE, destroy_file);
    File *file = make_object(KIND_FILE, sizeof *file);
    file->comm = own, file->descriptor = descriptor, file->amode = amode;
    file->path = must_have(strdup(filename));
    file->info = copy_info(info);
    file->object.errhandler = handler_of((const Object *)file_errors());
    keep(file->object.errhandler);
    error = begin_file(file);
    if (error) free_handle(file);
    else *fh = file;
    return error;
}

/* ---- closing ---- */

static int close_here(File *file) {
    int error = 0;
    enter_gate();
    /* What was written is on the disk when it is closed; a device without one has nothing to flush. */
    if (file->is_dirty && !(file->amode & MPI_MODE_DELETE_ON_CLOSE) && fsync(file->descriptor) && errno != EINVAL)
        error = errno;
    if (close(file->descriptor) && !error) error = errno;
    file->descriptor = -1;
    leave_gate();
    return error ? fail_of_system("closing", file->path, error) : MPI_SUCCESS;
}

static int delete_file(const char *path) {
    enter_gate();
    int error = unlink(path) ? errno : 0;
    leave_gate();
    return error ? fail_of_system("deleting", path, error) : MPI_SUCCESS;
}

int do_File_close(MPI_File *fh) {
    File *file = file_of(*fh);
    if (file == NULL) return fail(MPI_ERR_FILE, "the file is null or has been closed");
    if (file->split.name) return fail(MPI_ERR_IO, "closing %s: %s_begin has had no end", file->path, file->split.name);
    int error = agree(file->comm, close_here(file));
    if (file->amode & MPI_MODE_DELETE_ON_CLOSE) {
        int deleted = agree(file->comm, file->comm->rank == 0 ? delete_file(file->path) : MPI_SUCCESS);
        if (!error) error = deleted;
    }
    free_shared_pointer(file);
    free_handle(file);
    *fh = MPI_FILE_NULL;
    return error;
}

int do_File_delete(const char *filename, Info *info) {
    (void)info;
    return delete_file(filename);
}

/* ---- size ---- */

static int resize(File *file, MPI_Offset size, bool allocates) {
    TRY(expect_same(file->comm, size, "the size"));
    if (size < 0) return fail(MPI_ERR_ARG, "a size of %lld bytes, expected none or more", (long long)size);
    if (file->amode & MPI_MODE_RDONLY) return fail(MPI_ERR_READ_ONLY, "%s is open for reading", file->path);
    file->is_dirty = true;
    int error = MPI_SUCCESS;
    if (file->comm->rank == 0) {
        enter_gate();
        if (!allocates) error = ftruncate(file->descriptor, size) ? errno : 0;
        else if (size) error = posix_fallocate(file->descriptor, 0, size);
        leave_gate();
        if (error) error = fail_of_system("changing the size", file->path, error);
    }
    return agree(file->comm, error);
}

int do_File_set_size(File *fh, MPI_Offset size) { return resize(fh, size, false); }
int do_File_preallocate(File *fh, MPI_Offset size) { return resize(fh, size, true); }

int do_File_get_size(File *fh, MPI_Offset *size) {
    int error;
    *size = size_of(fh, &error);
    return error ? fail_of_system("asking for the size", fh->path, error) : MPI_SUCCESS;
}

/* ---- what it was opened with ---- */

int do_File_get_amode(File *fh, int *amode) { return *amode = fh->amode, MPI_SUCCESS; }
int do_File_get_group(File *fh, Group **group) {
    *group = make_group(fh->comm->size, fh->comm->world);
    return MPI_SUCCESS;
}
int do_File_get_info(File *fh, Info **info_used) { return *info_used = copy_info(fh->info), MPI_SUCCESS; }

int do_File_set_info(File *fh, Info *info) {
    update_info(&fh->info, info);
    return MPI_SUCCESS;
}

/* ---- views and positions ---- */

int do_File_set_view(File *fh, MPI_Offset disp, Datatype *etype, Datatype *filetype, const char *datarep, Info *info) {
    (void)info;
    if (strcmp(datarep, "native") && strcmp(datarep, "NATIVE"))
        return fail(MPI_ERR_UNSUPPORTED_DATAREP, "the data representation %s on %s; give native", datarep, fh->path);
    int error = MPI_SUCCESS;
    int64_t shared = 0;
#ifdef MPI_DISPLACEMENT_CURRENT
    if (disp == MPI_DISPLACEMENT_CURRENT && fh->amode & MPI_MODE_SEQUENTIAL) {
        error = get_shared(fh, &shared);
        disp = byte_offset(&fh->view, shared);
    }
#endif
    if (!error) error = take_view(fh, disp, etype, filetype);
    TRY(agree(fh->comm, error));
    fh->position = 0;
    return set_shared(fh, 0);
}

int do_File_get_view(File *fh, MPI_Offset *disp, Datatype **etype, Datatype **filetype, char *datarep) {
    *disp = fh->view.displacement;
    TRY(do_Type_dup(fh->etype, etype));
    TRY(do_Type_dup(fh->filetype, filetype));
    strcpy(datarep, "native");
    return MPI_SUCCESS;
}

/* Where a pointer goes, etypes. */
static int seek(const File *file, MPI_Offset offset, int whence, int64_t current, int64_t *found) {
    int error = 0;
    int64_t base = 0;
    if (whence == MPI_SEEK_CUR) base = current;
    else if (whence == MPI_SEEK_END) base = etypes_before(&file->view, size_of(file, &error));
    else if (whence != MPI_SEEK_SET)
        return fail(MPI_ERR_ARG, "seeking in %s: whence is %d; give MPI_SEEK_SET, CUR or END", file->path, whence);
    if (error) return fail_of_system("seeking", file->path, error);
    if (base + offset < 0)
        return fail(MPI_ERR_ARG, "seeking in %s: %lld + %lld lies before the view; expected 0 or more", file->path,
                    (long long)base, (long long)offset);
    *found = base + offset;
    return MPI_SUCCESS;
}

int do_File_seek(File *fh, MPI_Offset offset, int whence) {
    TRY(expect_random_access(fh, "seeking"));
    return seek(fh, offset, whence, fh->position, &fh->position);
}

int do_File_get_position(File *fh, MPI_Offset *offset) {
    TRY(expect_random_access(fh, "asking for the position"));
    *offset = fh->position;
    return MPI_SUCCESS;
}

int do_File_get_byte_offset(File *fh, MPI_Offset offset, MPI_Offset *disp) {
    if (offset < 0) return fail(MPI_ERR_ARG, "an offset of %lld, expected 0 or more", (long long)offset);
    *disp = byte_offset(&fh->view, offset);
    return MPI_SUCCESS;
}

int do_File_seek_shared(File *fh, MPI_Offset offset, int whence) {
    int64_t current, found = 0;
    TRY(expect_same(fh->comm, offset, "the offset"));
    TRY(expect_same(fh->comm, whence, "whence"));
    int error = get_shared(fh, &current);
    if (!error) error = seek(fh, offset, whence, current, &found);
    TRY(agree(fh->comm, error));
    return set_shared(fh, found);
}

int do_File_get_position_shared(File *fh, MPI_Offset *offset) {
    int64_t position;
    TRY(get_shared(fh, &position));
    *offset = position;
    return MPI_SUCCESS;
}

int do_File_get_type_extent(File *fh, Datatype *datatype, MPI_Count *extent) {
    (void)fh;
    *extent = datatype->extent;
    return MPI_SUCCESS;
}

/* ---- consistency ---- */

int do_File_set_atomicity(File *fh, int flag) {
    TRY(expect_same(fh->comm, !!flag, "the flag"));
    fh->is_atomic = flag;
    return MPI_SUCCESS;
}

int do_File_get_atomicity(File *fh, int *flag) { return *flag = fh->is_atomic, MPI_SUCCESS; }

int do_File_sync(File *fh) {
    enter_gate();
    int error = fsync(fh->descriptor) && errno != EINVAL ? errno : 0;
    leave_gate();
    fh->is_dirty = false;
    return agree(fh->comm, error ? fail_of_system("flushing", fh->path, error) : MPI_SUCCESS);
}
