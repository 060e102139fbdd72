/* Memory that ranks of one host share: which ranks are on one host, and how is a file mapped by all of them?
 *
 * The folder has a name of its own in every program's namespace, so an image finds its files again on another host. Files
 * are made, mapped and removed inside the gate: while images are taken, all ranks of a host agree on which there are, and
 * their bytes are copied once, when all of them are stopped. The file keeps its name for as long as it is mapped.
 */
#include "shared_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "channel.h"
#include "exchange.h"
#include "slots.h"

enum { PAGE = 4096 };

/* Beside the channel, whose folder is of the same name in every namespace. */
static void path_of(char *path, size_t room, const char *name) {
    const char *channel = channel_path(), *slash = strrchr(channel, '/');
    snprintf(path, room, "%.*s/shared/%s", (int)(slash - channel), channel, name);
}

static void path_of_comm(char *path, size_t room, const Comm *comm) {
    char name[32];
    snprintf(name, sizeof name, "%016llx", (unsigned long long)comm->number);
    path_of(path, room, name);
}

/* ---- Hosts ---- */

/* The folder itself, on the kernel that runs: ranks that see the same one can share memory. */
static uint64_t host_number(void) {
    char path[PATH_MAX], boot[64] = "";
    struct stat status = {0};
    path_of(path, sizeof path, "");
    stat(path, &status);
    int descriptor = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (descriptor >= 0) {
        if (read(descriptor, boot, sizeof boot - 1) < 0) boot[0] = 0;
        close(descriptor);
    }
    return mix_numbers(mix_numbers(number_of_text(boot), status.st_dev), status.st_ino);
}

/* Told twice: between a rank's word and the last one's a restart may have moved them all. */
int gather_hosts(Comm *comm, uint64_t *hosts) {
    uint64_t *again = NEW_ARRAY(uint64_t, comm->size);
    size_t num_bytes = (size_t)comm->size * sizeof *hosts;
    int error;
    do {
        uint64_t mine = host_number();
        error = gather_all(comm, &mine, sizeof mine, hosts);
        mine = host_number();
        if (!error) error = gather_all(comm, &mine, sizeof mine, again);
    } while (!error && memcmp(hosts, again, num_bytes));
    free(again);
    return error;
}

/* ---- Files ---- */

/* This rank's mapping; all pages are there from the beginning: later a full file system would end the program. */
static int map_here(const char *path, bool makes, int64_t num_bytes, char **at) {
    void *found = MAP_FAILED;
    enter_gate();
    int descriptor = open(path, O_RDWR | O_CLOEXEC | (makes ? O_CREAT | O_EXCL : 0), 0600);
    int error = descriptor < 0 ? errno : makes ? posix_fallocate(descriptor, 0, num_bytes) : 0;
    if (!error) {
        found = mmap(NULL, (size_t)num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
        error = found == MAP_FAILED ? errno : 0;
    }
    if (error && makes && descriptor >= 0) unlink(path);
    if (descriptor >= 0) close(descriptor);
    leave_gate();
    if (!error) {
        *at = found;
        return MPI_SUCCESS;
    }
    return fail(error == ENOSPC || error == ENOMEM ? MPI_ERR_NO_MEM : MPI_ERR_RMA_SHARED,
                "sharing %lld bytes among ranks of this host: %s: %s%s", (long long)num_bytes, path, strerror(error),
                error == ENOENT ? "; its ranks came apart at a restart" : "");
}

/* The first rank's file goes when nobody has it any more: an image knows a mapped file by its name. */
static int unmap_everywhere(Comm *comm, char *at, int64_t num_bytes) {
    char path[PATH_MAX];
    path_of_comm(path, sizeof path, comm);
    if (comm->rank && at) munmap(at, (size_t)num_bytes);
    int error = barrier(comm);
    if (comm->rank || !at) return error;
    enter_gate();
    munmap(at, (size_t)num_bytes);
    unlink(path);
    leave_gate();
    return error;
}

static int map_everywhere(Comm *comm, int64_t num_bytes, char **at) {
    char path[PATH_MAX];
    path_of_comm(path, sizeof path, comm);
    TRY(agree(comm, comm->rank ? MPI_SUCCESS : map_here(path, true, num_bytes, at)));
    int error = agree(comm, comm->rank ? map_here(path, false, num_bytes, at) : MPI_SUCCESS);
    if (error) unmap_everywhere(comm, *at, num_bytes);
    return error;
}

/* ---- What windows ask for ---- */

/* Bytes of all parts. */
static int64_t place_parts(const int64_t *sizes, int count, bool is_apart, int64_t *starts) {
    int64_t end = 0;
    for (int rank = 0; rank < count; rank++) {
        starts[rank] = is_apart && !sizes[rank] ? NOWHERE : end;
        end += is_apart ? (sizes[rank] + PAGE - 1) / PAGE * PAGE : sizes[rank];
    }
    return end ? end : 1;
}

int make_shared_memory(Comm *comm, const int64_t *sizes, bool is_apart, SharedMemory **made) {
    SharedMemory *memory = NEW(SharedMemory);
    memory->starts = NEW_ARRAY(int64_t, comm->size);
    memory->num_bytes = place_parts(sizes, comm->size, is_apart, memory->starts);
    int error = map_everywhere(comm, memory->num_bytes, &memory->at);
    if (!error) {
        *made = memory;
        return MPI_SUCCESS;
    }
    free(memory->starts);
    free(memory);
    return error;
}

int free_shared_memory(Comm *comm, SharedMemory *memory) {
    if (!memory) return MPI_SUCCESS;
    int error = unmap_everywhere(comm, memory->at, memory->num_bytes);
    free(memory->starts);
    free(memory);
    return error;
}
