// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// A program that connects, sends one message and ends at once. `one_message PORT NUMBER WAY`: `exit`,
// `_exit`, `quick_exit`, `exec`, `exec_open`, or `beside`: three more threads send a message each, and
// then make connections until the process ends.
#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define CHECK(is) \
    do { if (!(is)) { dprintf(2, "%s: line %d: %s, errno %d\n", number, __LINE__, #is, errno); _exit(3); } } while (0)
#define THREADS 3

static const char *number;
static int port;
static atomic_int sent;

static int begin(const char *text, int must_arrive) {
    struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(port) };
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(fd >= 0);
    CHECK(connect(fd, (void *)&to, sizeof to) == 0 || !must_arrive);
    ssize_t length = strlen(text);
    CHECK(send(fd, text, length, MSG_NOSIGNAL) == length || !must_arrive);
    return fd;
}

static void *work(void *at) {
    char text[64];
    snprintf(text, sizeof text, "%s.%ld\n", number, (long)at);
    begin(text, 1);
    sent++;
    // The process ends in the middle of one of these. The server ends when it has all messages.
    for (;;) {
        close(begin("-\n", 0));
        setenv("ONE_MESSAGE", "1", 1);
    }
    return NULL;
}

int main(int argc, char **argv) {
    number = argc > 2 ? argv[2] : "none";
    CHECK(argc == 4);
    port = atoi(argv[1]);
    const char *way = argv[3];
    // libc has no lock for a reader while a thread adds a name.
    setenv("ONE_MESSAGE", "0", 1);
    if (strcmp(way, "beside") == 0) {
        pthread_t threads[THREADS];
        for (long i = 0; i < THREADS; i++) CHECK(pthread_create(&threads[i], NULL, work, (void *)i) == 0);
    }
    char text[64];
    snprintf(text, sizeof text, "%s\n", number);
    int fd = begin(text, 1);
    while (strcmp(way, "beside") == 0 && sent < THREADS) usleep(100);
    // `exec_open` leaves the connection to the program that is executed.
    int is_left = strcmp(way, "exec_open") == 0 || atoi(number) / 10 % 2;
    if (!is_left || strcmp(way, "exec") == 0) close(fd);
    if (strcmp(way, "_exit") == 0) _exit(0);
    if (strcmp(way, "quick_exit") == 0) quick_exit(0);
    if (strncmp(way, "exec", 4) == 0) execlp("true", "true", NULL);
    return 0;
}
