/* What lower_plain.c offers. */
typedef struct {
    int (*count)(void), (*fail)(void), (*take_memory)(void), (*take_descriptors)(void), (*take_threads)(void),
        (*set_handler)(void), (*run_command)(void), (*crash)(void), (*wait_ms)(int), (*tell_of_end)(int *);
} Plain;
