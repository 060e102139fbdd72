/* Groups: ordered sets of processes, named by their ranks in the world. */
#include "group.h"

static void destroy_group(void *object) {
    Group *group = object;
    free(group->world);
    let_go(group->session);
}

void make_predefined_groups(void) {
    set_destructor(KIND_GROUP, destroy_group);
    make_predefined(KIND_GROUP, sizeof(Group), BITS(MPI_GROUP_EMPTY));
}

/* A group of as many processes, whose ranks the caller fills in. */
static Group *new_group(int size) {
    if (size == 0) return group_of(MPI_GROUP_EMPTY);
    Group *group = make_object(KIND_GROUP, sizeof(Group));
    group->size = size;
    group->world = NEW_ARRAY(int, size);
    return group;
}

Group *make_group(int size, const int *world) {
    Group *group = new_group(size);
    if (size) memcpy(group->world, world, (size_t)size * sizeof *world);
    return group;
}

int rank_in_group(const Group *group, int world) {
    for (int i = 0; i < group->size; i++) {
        if (group->world[i] == world) return i;
    }
    return MPI_UNDEFINED;
}

/* ---- Looking up many ranks ---- */

/* World rank to rank in a group, for groups that are asked often. */
typedef struct {
    int size; /* the largest world rank is smaller */
    int *rank;
} Lookup;

static Lookup lookup_of(const Group *group) {
    Lookup lookup = {0};
    for (int i = 0; i < group->size; i++) {
        if (group->world[i] >= lookup.size) lookup.size = group->world[i] + 1;
    }
    lookup.rank = NEW_ARRAY(int, lookup.size);
    for (int world = 0; world < lookup.size; world++) lookup.rank[world] = MPI_UNDEFINED;
    for (int i = 0; i < group->size; i++) lookup.rank[group->world[i]] = i;
    return lookup;
}

static int look_up(const Lookup *lookup, int world) {
    return world < lookup->size ? lookup->rank[world] : MPI_UNDEFINED;
}

/* ---- Questions ---- */

int do_Group_size(Group *group, int *size) {
    *size = group->size;
    return MPI_SUCCESS;
}

int do_Group_rank(Group *group, int *rank) {
    *rank = rank_in_group(group, process.rank);
    return MPI_SUCCESS;
}

int do_Group_translate_ranks(Group *group1, int n, const int ranks1[], Group *group2, int ranks2[]) {
    Lookup theirs = lookup_of(group2);
    int error = MPI_SUCCESS;
    for (int i = 0; i < n && !error; i++) {
        if (ranks1[i] == MPI_PROC_NULL) ranks2[i] = MPI_PROC_NULL;
        else if (ranks1[i] < 0 || ranks1[i] >= group1->size)
            error = fail(MPI_ERR_RANK, "rank %d of a group of %d", ranks1[i], group1->size);
        else ranks2[i] = look_up(&theirs, group1->world[ranks1[i]]);
    }
    free(theirs.rank);
    return error;
}

int do_Group_compare(Group *group1, Group *group2, int *result) {
    *result = MPI_UNEQUAL;
    if (group1->size != group2->size) return MPI_SUCCESS;
    size_t num_bytes = (size_t)group1->size * sizeof *group1->world;
    if (num_bytes == 0 || !memcmp(group1->world, group2->world, num_bytes)) {
        *result = MPI_IDENT;
        return MPI_SUCCESS;
    }
    Lookup theirs = lookup_of(group2);
    *result = MPI_SIMILAR;
    for (int i = 0; i < group1->size; i++) {
        if (look_up(&theirs, group1->world[i]) == MPI_UNDEFINED) *result = MPI_UNEQUAL;
    }
    free(theirs.rank);
    return MPI_SUCCESS;
}

/* ---- Sets ---- */

/* Of the members of `from` those that are in `of`, or those that are not, behind the first `size` of `world`. */
static int pick(const Group *from, const Group *of, bool are_in, int size, int *world) {
    Lookup known = lookup_of(of);
    for (int i = 0; i < from->size; i++) {
        bool is_in = look_up(&known, from->world[i]) != MPI_UNDEFINED;
        if (is_in == are_in) world[size++] = from->world[i];
    }
    free(known.rank);
    return size;
}

static int make_set(int size, int *world, Group **newgroup) {
    *newgroup = make_group(size, world);
    free(world);
    return MPI_SUCCESS;
}

int do_Group_union(Group *group1, Group *group2, Group **newgroup) {
    int *world = NEW_ARRAY(int, group1->size + group2->size);
    if (group1->size) memcpy(world, group1->world, (size_t)group1->size * sizeof *world);
    return make_set(pick(group2, group1, false, group1->size, world), world, newgroup);
}

int do_Group_intersection(Group *group1, Group *group2, Group **newgroup) {
    int *world = NEW_ARRAY(int, group1->size);
    return make_set(pick(group1, group2, true, 0, world), world, newgroup);
}

int do_Group_difference(Group *group1, Group *group2, Group **newgroup) {
    int *world = NEW_ARRAY(int, group1->size);
    return make_set(pick(group1, group2, false, 0, world), world, newgroup);
}

/* ---- Members that are named ---- */

/* Which members are among the n ranks; fails if one is none, or named twice. */
static int mark(const Group *group, int n, const int ranks[], bool *is_named) {
    for (int i = 0; i < n; i++) {
        if (ranks[i] < 0 || ranks[i] >= group->size)
            return fail(MPI_ERR_RANK, "rank %d of a group of %d", ranks[i], group->size);
        if (is_named[ranks[i]]) return fail(MPI_ERR_RANK, "rank %d is named twice", ranks[i]);
        is_named[ranks[i]] = true;
    }
    return MPI_SUCCESS;
}

int do_Group_incl(Group *group, int n, const int ranks[], Group **newgroup) {
    bool *is_named = NEW_ARRAY(bool, group->size);
    int error = mark(group, n, ranks, is_named);
    free(is_named);
    TRY(error);
    Group *made = new_group(n);
    for (int i = 0; i < n; i++) made->world[i] = group->world[ranks[i]];
    *newgroup = made;
    return MPI_SUCCESS;
}

int do_Group_excl(Group *group, int n, const int ranks[], Group **newgroup) {
    bool *is_named = NEW_ARRAY(bool, group->size);
    int error = mark(group, n, ranks, is_named);
    if (!error) {
        Group *made = new_group(group->size - n);
        for (int i = 0, at = 0; i < group->size; i++) {
            if (!is_named[i]) made->world[at++] = group->world[i];
        }
        *newgroup = made;
    }
    free(is_named);
    return error;
}

/* The ranks of (first, last, stride), one range behind the other; a valid list names at most all members. */
static int spread_ranges(const Group *group, int n, int ranges[][3], int **ranks, int *count) {
    *ranks = NEW_ARRAY(int, group->size);
    *count = 0;
    for (int i = 0; i < n; i++) {
        int64_t first = ranges[i][0], last = ranges[i][1], stride = ranges[i][2];
        if (stride == 0) return fail(MPI_ERR_ARG, "range %d has a stride of 0", i);
        for (int64_t rank = first; stride > 0 ? rank <= last : rank >= last; rank += stride) {
            if (*count == group->size || rank < 0 || rank >= group->size)
                return fail(MPI_ERR_RANK, "range %d: rank %lld of a group of %d", i, (long long)rank, group->size);
            (*ranks)[(*count)++] = (int)rank;
        }
    }
    return MPI_SUCCESS;
}

int do_Group_range_incl(Group *group, int n, int ranges[][3], Group **newgroup) {
    int *ranks, count;
    int error = spread_ranges(group, n, ranges, &ranks, &count);
    if (!error) error = do_Group_incl(group, count, ranks, newgroup);
    free(ranks);
    return error;
}

int do_Group_range_excl(Group *group, int n, int ranges[][3], Group **newgroup) {
    int *ranks, count;
    int error = spread_ranges(group, n, ranges, &ranks, &count);
    if (!error) error = do_Group_excl(group, count, ranks, newgroup);
    free(ranks);
    return error;
}

int do_Group_free(MPI_Group *group) {
    Group *one = group_of(*group);
    if (*group == MPI_GROUP_NULL) return fail(MPI_ERR_GROUP, "group is MPI_GROUP_NULL");
    if (!one) return fail(MPI_ERR_GROUP, "group is no such handle");
    free_handle(one);
    *group = MPI_GROUP_NULL;
    return MPI_SUCCESS;
}
