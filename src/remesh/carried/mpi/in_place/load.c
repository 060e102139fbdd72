/* Loading of a second program, with a C library of its own, into this process: what the kernel does at execve, by hand.
 *
 *   1. The dynamic loader is mapped into the region, its system calls rewritten (sites.c).
 *   2. It gets a stack with arguments, environment and auxiliary vector, and is jumped to. It maps the lower half and its
 *      libraries, whose system calls are rewritten as they come (region.c).
 *   3. The lower half's main() fills in the Handover and leaves: the function that jumped returns.
 */
#define _GNU_SOURCE
#include <asm/hwcap2.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "in_place.h"

enum { STACK_BYTES = 8 << 20, MAX_SEGMENTS_OF_LOADER = 16, PATIENCE_MS = 10000 };
static const char LOADER[] = "/lib64/ld-linux-x86-64.so.2";

static Handover handover;
static char words[512];

static const char *tell(const char *format, ...) __attribute__((format(printf, 1, 2)));
static const char *tell(const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(words, sizeof words, format, values);
    va_end(values);
    return words;
}

const char *what_is_lacking(void) {
    unsigned long shadow = 0;
    if (!(getauxval(AT_HWCAP2) & HWCAP2_FSGSBASE))
        return "the kernel does not let programs set their thread pointer (FSGSBASE: Linux 5.9 or later, on a processor "
               "that has it)";
    if (syscall(SYS_arch_prctl, 0x5005 /* ARCH_SHSTK_STATUS */, &shadow) == 0 && shadow & 1)
        return "the program has a shadow stack (GLIBC_TUNABLES=glibc.cpu.hwcaps=-SHSTK starts it without)";
    if (access(LOADER, R_OK)) return tell("%s: %s", LOADER, strerror(errno));
    return NULL;
}

/* Where the dynamic loader was mapped to, and its head; NULL with `words` if it could not be. */
static unsigned char *map_loader(Elf64_Ehdr *head) {
    Elf64_Phdr parts[MAX_SEGMENTS_OF_LOADER];
    int fd = open(LOADER, O_RDONLY | O_CLOEXEC);
    unsigned char *base = NULL;
    uint64_t bytes = 0;
    if (fd < 0 || pread(fd, head, sizeof *head, 0) != sizeof *head || head->e_phnum > MAX_SEGMENTS_OF_LOADER ||
        pread(fd, parts, sizeof *parts * head->e_phnum, (off_t)head->e_phoff) != (ssize_t)(sizeof *parts * head->e_phnum)) {
        tell("reading %s: %s", LOADER, strerror(errno));
        goto end;
    }
    for (int i = 0; i < head->e_phnum; i++)
        if (parts[i].p_type == PT_LOAD && parts[i].p_vaddr + parts[i].p_memsz > bytes)
            bytes = parts[i].p_vaddr + parts[i].p_memsz;
    long at = map_in_region(PAGE_UP(bytes), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0, true);
    if (at < 0) {
        tell("mapping %s: %s", LOADER, strerror((int)-at));
        goto end;
    }
    base = (unsigned char *)at;
    for (int i = 0; i < head->e_phnum; i++) {
        const Elf64_Phdr *part = &parts[i];
        if (part->p_type != PT_LOAD) continue;
        int protection = (part->p_flags & PF_R ? PROT_READ : 0) | (part->p_flags & PF_W ? PROT_WRITE : 0) |
                         (part->p_flags & PF_X ? PROT_EXEC : 0);
        uint64_t from = part->p_vaddr & ~(PAGE - 1), end = part->p_vaddr + part->p_filesz;
        uint64_t whole = part->p_vaddr + part->p_memsz;
        off_t offset = (off_t)(part->p_offset & ~(PAGE - 1));
        bool is_mapped = mmap(base + from, end - from, protection, MAP_PRIVATE | MAP_FIXED, fd, offset) != MAP_FAILED;
        if (is_mapped && whole > end) {
            memset(base + end, 0, PAGE_UP(end) - end);
            if (PAGE_UP(whole) > PAGE_UP(end))
                is_mapped = mmap(base + PAGE_UP(end), PAGE_UP(whole) - PAGE_UP(end), protection,
                                 MAP_PRIVATE | MAP_FIXED | MAP_ANONYMOUS, -1, 0) != MAP_FAILED;
        }
        if (!is_mapped || (part->p_flags & PF_X && rewrite_code(base + from, end - from) <= 0)) {
            tell("mapping %s: %s", LOADER, is_mapped ? "its system calls are not where we look for them" : strerror(errno));
            base = NULL;
            goto end;
        }
    }
end:
    if (fd >= 0) close(fd);
    return base;
}

/* A stack that is filled from its top. */
typedef struct {
    char *bottom, *top;
    bool is_full;
} Stack;
static char *push(Stack *stack, const void *bytes, size_t count) {
    if ((size_t)(stack->top - stack->bottom) < count + STACK_BYTES / 2) {
        stack->is_full = true;
        return stack->top;
    }
    return memcpy(stack->top -= count, bytes, count);
}
static char *push_text(Stack *stack, const char *text) { return push(stack, text, strlen(text) + 1); }

/* What a program finds on its stack: argc, arguments, environment, auxiliary vector. NULL if there is too much of it. */
static char *fill_stack(Stack *stack, const char *const *arguments, char *const *environment,
                        const uint64_t (*auxiliary)[2], size_t num_auxiliary) {
    size_t num_arguments = 0, num_variables = 0;
    while (arguments[num_arguments]) num_arguments++;
    while (environment[num_variables]) num_variables++;
    size_t num_words = 1 + num_arguments + 1 + num_variables + 1 + 2 * num_auxiliary;
    uint64_t *content = malloc(8 * num_words), *to = content;
    if (!content) return NULL;
    *to++ = num_arguments;
    for (size_t i = 0; i < num_arguments; i++) *to++ = (uint64_t)push_text(stack, arguments[i]);
    *to++ = 0;
    for (size_t i = 0; i < num_variables; i++) *to++ = (uint64_t)push_text(stack, environment[i]);
    *to++ = 0;
    memcpy(to, auxiliary, 16 * num_auxiliary);
    stack->top = (char *)(((uintptr_t)stack->top & ~15ul) - (num_words % 2 ? 8 : 0));
    push(stack, content, 8 * num_words);
    free(content);
    return stack->is_full ? NULL : stack->top;
}

static const char *start(const char *program, const char *library_path, char *const *environment) {
    Elf64_Ehdr head;
    unsigned char *base = map_loader(&head);
    if (!base) return words;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    long bottom = map_in_region(STACK_BYTES, PROT_READ | PROT_WRITE, flags, -1, 0, false);
    if (bottom < 0) return tell("a stack for the lower half: %s", strerror((int)-bottom));
    Stack stack = {(char *)bottom, (char *)bottom + STACK_BYTES, false};
    /* Both halves get one secret, by which a C library guards stacks (fs:0x28) and addresses that it keeps (fs:0x30): a
     * function that crosses may then have a guard.
     */
    uint64_t secrets[2];
    __asm__("mov %%fs:0x28,%0" : "=r"(secrets[0]));
    __asm__("mov %%fs:0x30,%0" : "=r"(secrets[1]));
    char *random = push(&stack, secrets, sizeof secrets);
    char *name = push_text(&stack, program), *platform = push_text(&stack, "x86_64");
    char address[32];
    snprintf(address, sizeof address, "%lx", (unsigned long)&handover);
    const char *arguments[] = {LOADER, "--library-path", library_path, program, address, NULL};
    const uint64_t auxiliary[][2] = {
        {AT_PHDR, (uint64_t)base + head.e_phoff}, {AT_PHENT, head.e_phentsize}, {AT_PHNUM, head.e_phnum}, {AT_PAGESZ, PAGE},
        {AT_BASE, 0}, {AT_FLAGS, 0}, {AT_ENTRY, (uint64_t)base + head.e_entry}, {AT_UID, getuid()}, {AT_EUID, geteuid()},
        {AT_GID, getgid()}, {AT_EGID, getegid()}, {AT_SECURE, 0}, {AT_RANDOM, (uint64_t)random}, {AT_HWCAP, getauxval(AT_HWCAP)},
        {AT_HWCAP2, getauxval(AT_HWCAP2)}, {AT_CLKTCK, getauxval(AT_CLKTCK)}, {AT_PLATFORM, (uint64_t)platform},
        {AT_EXECFN, (uint64_t)name}, {AT_SYSINFO_EHDR, getauxval(AT_SYSINFO_EHDR)}, {AT_MINSIGSTKSZ, getauxval(AT_MINSIGSTKSZ)},
        {AT_NULL, 0}};
    char *top = fill_stack(&stack, arguments, environment, auxiliary, sizeof auxiliary / sizeof *auxiliary);
    if (!top) return "the environment of the lower half does not fit on its stack";
    handover = (Handover){0};
    set_way_back(&handover.upper);
    enter_program(&handover.upper, top, base + head.e_entry);
    set_way_back(NULL);
    if (handover.functions == NULL)
        return tell("the lower half %s ended with status %d before it was there; what it said stands above", program,
                    status_of_end());
    return NULL;
}

const char *load_lower(const char *program, const char *library_path, char *const *environment, const void **functions) {
    const char *lacking = what_is_lacking();
    if (lacking) return lacking;
    if (!open_region())
        return tell("addresses %#lx to %#lx are not free in this process, or take no code", REGION_START,
                    REGION_START + REGION_BYTES);
    /* While it starts, nobody knows how to come back from it. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const char *error = start(program, library_path, environment);
    if (!error) error = enter_signals_through_us(&handover);
    if (!error) begin_places(&handover);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error) drop_region(PATIENCE_MS);
    else *functions = handover.functions;
    return error;
}

const char *end_lower(void) {
    if (!my_crossing.place) borrow_place();
    handover.ending_fs = my_crossing.fs;
    set_way_back(&handover.upper);
    enter_program(&handover.upper, handover.stack, (void *)(uintptr_t)handover.end);
    set_way_back(NULL);
    return drop_lower();
}

const char *drop_lower(void) {
    int left = drop_region(PATIENCE_MS);
    if (left) return tell("%d threads of the lower half did not end within %d s; it stays", left, PATIENCE_MS / 1000);
    end_places();
    return NULL;
}
