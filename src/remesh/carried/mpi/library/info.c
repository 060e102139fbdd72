/* Infos: pairs of key and value, in the order in which the keys were first set. */
#include "info.h"

#include <unistd.h>

typedef struct {
    char *key, *value;
} Pair;

struct Info {
    Object object;
    int num_pairs, room;
    Pair *pairs;
};

static void destroy_info(void *object) {
    Info *info = object;
    for (int i = 0; i < info->num_pairs; i++) {
        free(info->pairs[i].key);
        free(info->pairs[i].value);
    }
    free(info->pairs);
}

static char *copy_text(const char *text) { return must_have(strdup(text)); }

static Pair *find(const Info *info, const char *key) {
    for (int i = 0; info && i < info->num_pairs; i++) {
        if (!strcmp(info->pairs[i].key, key)) return &info->pairs[i];
    }
    return NULL;
}

const char *info_value(const Info *info, const char *key) {
    const Pair *pair = find(info, key);
    return pair ? pair->value : NULL;
}

void put_info(Info *info, const char *key, const char *value) {
    Pair *pair = find(info, key);
    if (pair) {
        free(pair->value);
        pair->value = copy_text(value);
        return;
    }
    if (info->num_pairs == info->room) {
        info->room = info->room ? 2 * info->room : 4;
        info->pairs = must_have(realloc(info->pairs, (size_t)info->room * sizeof *info->pairs));
    }
    info->pairs[info->num_pairs++] = (Pair){copy_text(key), copy_text(value)};
}

Info *copy_info(const Info *info) {
    Info *copy = make_object(KIND_INFO, sizeof(Info));
    for (int i = 0; info && i < info->num_pairs; i++) put_info(copy, info->pairs[i].key, info->pairs[i].value);
    return copy;
}

void update_info(Info **held, const Info *given) {
    if (!*held) *held = copy_info(NULL);
    for (int i = 0; given && i < given->num_pairs; i++) put_info(*held, given->pairs[i].key, given->pairs[i].value);
}

/* ---- What is known of the program's start. Source: MPI 4.1, section 11.2.1 ---- */

/* The arguments as the kernel keeps them, one after the other. */
static char *read_arguments(size_t *num_bytes) {
    FILE *file = fopen("/proc/self/cmdline", "r");
    char *text = NULL;
    size_t room = 0;
    *num_bytes = 0;
    for (size_t got = 1; file && got > 0; *num_bytes += got) {
        room = *num_bytes + 4096;
        text = must_have(realloc(text, room));
        got = fread(text + *num_bytes, 1, room - *num_bytes, file);
    }
    if (file) fclose(file);
    return text;
}

static void tell_environment(Info *info) {
    size_t num_bytes;
    char *text = read_arguments(&num_bytes), directory[4096];
    size_t first = text ? strnlen(text, num_bytes) : 0;
    if (first < num_bytes) {
        put_info(info, "command", text);
        /* The others, with blanks between them. */
        for (size_t i = first + 1; i + 1 < num_bytes; i++) text[i] = text[i] ? text[i] : ' ';
        if (first + 1 < num_bytes) put_info(info, "argv", text + first + 1);
    }
    free(text);
    if (getcwd(directory, sizeof directory)) put_info(info, "wdir", directory);
    put_info(info, "thread_level", "MPI_THREAD_MULTIPLE");
}

void make_predefined_infos(void) {
    set_destructor(KIND_INFO, destroy_info);
    tell_environment(make_predefined(KIND_INFO, sizeof(Info), BITS(MPI_INFO_ENV)));
}

int do_Info_create_env(int argc, char argv[], Info **info) {
    (void)argc;
    (void)argv;
    *info = copy_info(info_of(MPI_INFO_ENV));
    return MPI_SUCCESS;
}

/* ---- MPI's functions ---- */

static int check_info(const Info *info) {
    return info ? MPI_SUCCESS : fail(MPI_ERR_INFO, "info is MPI_INFO_NULL");
}

static int check_key(const char *key) {
    size_t length = key ? strlen(key) : 0;
    if (length > 0 && length <= MPI_MAX_INFO_KEY) return MPI_SUCCESS;
    return fail(MPI_ERR_INFO_KEY, "the key has %zu characters, expected 1 to %d", length, MPI_MAX_INFO_KEY);
}

int do_Info_create(Info **info) {
    *info = copy_info(NULL);
    return MPI_SUCCESS;
}

int do_Info_dup(Info *info, Info **newinfo) {
    TRY(check_info(info));
    *newinfo = copy_info(info);
    return MPI_SUCCESS;
}

int do_Info_free(MPI_Info *info) {
    Info *one = info_of(*info);
    if (!one) return fail(MPI_ERR_INFO, *info == MPI_INFO_NULL ? "info is MPI_INFO_NULL" : "info is no such handle");
    if (one->object.is_predefined) return fail(MPI_ERR_INFO, "MPI_INFO_ENV is predefined and cannot be freed");
    free_handle(one);
    *info = MPI_INFO_NULL;
    return MPI_SUCCESS;
}

int do_Info_set(Info *info, const char *key, const char *value) {
    TRY(check_info(info));
    TRY(check_key(key));
    size_t length = value ? strlen(value) : 0;
    if (!value || length > MPI_MAX_INFO_VAL)
        return fail(MPI_ERR_INFO_VALUE, "the value has %zu characters, expected at most %d", length, MPI_MAX_INFO_VAL);
    put_info(info, key, value);
    return MPI_SUCCESS;
}

int do_Info_delete(Info *info, const char *key) {
    TRY(check_info(info));
    TRY(check_key(key));
    Pair *pair = find(info, key);
    if (!pair) return fail(MPI_ERR_INFO_NOKEY, "there is no key \"%s\"", key);
    free(pair->key);
    free(pair->value);
    size_t behind = (size_t)(info->pairs + --info->num_pairs - pair);
    memmove(pair, pair + 1, behind * sizeof *pair);
    return MPI_SUCCESS;
}

int do_Info_get(Info *info, const char *key, int valuelen, char *value, int *flag) {
    TRY(check_info(info));
    TRY(check_key(key));
    if (valuelen < 0) return fail(MPI_ERR_ARG, "valuelen is %d, expected 0 or more", valuelen);
    const char *found = info_value(info, key);
    *flag = found != NULL;
    /* The program has room for the end of the text, too. */
    if (found) snprintf(value, (size_t)valuelen + 1, "%s", found);
    return MPI_SUCCESS;
}

int do_Info_get_string(Info *info, const char *key, int *buflen, char *value, int *flag) {
    TRY(check_info(info));
    TRY(check_key(key));
    if (*buflen < 0) return fail(MPI_ERR_ARG, "buflen is %d, expected 0 or more", *buflen);
    const char *found = info_value(info, key);
    *flag = found != NULL;
    if (!found) return MPI_SUCCESS;
    if (*buflen > 0) snprintf(value, (size_t)*buflen, "%s", found);
    *buflen = (int)strlen(found) + 1;
    return MPI_SUCCESS;
}

int do_Info_get_valuelen(Info *info, const char *key, int *valuelen, int *flag) {
    TRY(check_info(info));
    TRY(check_key(key));
    const char *found = info_value(info, key);
    *flag = found != NULL;
    if (found) *valuelen = (int)strlen(found);
    return MPI_SUCCESS;
}

int do_Info_get_nkeys(Info *info, int *nkeys) {
    TRY(check_info(info));
    *nkeys = info->num_pairs;
    return MPI_SUCCESS;
}

int do_Info_get_nthkey(Info *info, int n, char *key) {
    TRY(check_info(info));
    if (n < 0 || n >= info->num_pairs) return fail(MPI_ERR_ARG, "key number %d of %d", n, info->num_pairs);
    sprintf(key, "%s", info->pairs[n].key);
    return MPI_SUCCESS;
}
