// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// An echo server with a thread per connection, and a client with several at once. `sanitized MODE PORT`.
#include <arpa/inet.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define CHECK(is) do { if (!(is)) { perror(#is); exit(3); } } while (0)
#define THREADS 4
#define TURNS 300

static int port;

static void *serve(void *value) {
    int fd = (int)(intptr_t)value;
    char *room = malloc(5000);
    for (ssize_t n; (n = read(fd, room, 5000)) != 0;) {
        CHECK(n > 0);
        CHECK(write(fd, room, n) == n);
    }
    free(room);
    close(fd);
    return NULL;
}

static void *ask(void *unused) {
    (void)unused;
    struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(port) };
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(connect(fd, (void *)&to, sizeof to) == 0);
    char *out = malloc(4000), *in = malloc(4000);
    for (int turn = 0; turn < TURNS; turn++) {
        memset(out, turn, 4000);
        CHECK(send(fd, out, 4000, 0) == 4000);
        CHECK(recv(fd, in, 4000, MSG_WAITALL) == 4000);
        CHECK(memcmp(in, out, 4000) == 0);
    }
    free(out);
    free(in);
    close(fd);
    return NULL;
}

int main(int argc, char **argv) {
    CHECK(argc == 3);
    port = atoi(argv[2]);
    pthread_t threads[THREADS];
    int is_server = strcmp(argv[1], "server") == 0, listener = -1;
    if (is_server) {
        struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons(port) };
        at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        listener = socket(AF_INET, SOCK_STREAM, 0);
        CHECK(bind(listener, (void *)&at, sizeof at) == 0 && listen(listener, 16) == 0);
    }
    for (int i = 0; i < THREADS; i++) {
        void *value = NULL;
        if (is_server) {
            int fd = accept(listener, NULL, NULL);
            CHECK(fd >= 0);
            value = (void *)(intptr_t)fd;
        }
        CHECK(pthread_create(&threads[i], NULL, is_server ? serve : ask, value) == 0);
    }
    for (int i = 0; i < THREADS; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    puts("all bytes");
    return 0;
}
