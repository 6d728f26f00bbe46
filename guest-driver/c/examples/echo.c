// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * Echo with the sockets of libsmc: a server with a thread per connection, and a client.
 *
 *     smc fabric --socket-path /tmp/any.sock,devices=8 &
 *     export SMC_DEVICE=/tmp/any.sock
 *     cc -o echo echo.c $(pkg-config --cflags --libs smc) -pthread
 *     ./echo server 127.0.0.1 5000 &
 *     ./echo client 127.0.0.1 5000
 *
 * Both ends print what carries the bytes. Without SMC_DEVICE that is TCP.
 */
#define _POSIX_C_SOURCE 200809L

#include <arpa/inet.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <smc.h>

#define MESSAGE 4096
#define ROUNDS 256

static int failed(const char *what)
{
	fprintf(stderr, "echo: %s: %s\n", what, smc_last_error());
	return 1;
}

static void print_info(smc_socket *socket)
{
	char text[512];

	if (smc_info_text(socket, text, sizeof(text)) >= 0)
		puts(text);
}

/* Sends back whatever comes, until the client has ended its direction. */
static void *echo(void *arg)
{
	smc_socket *socket = (smc_socket *)arg;
	char buf[16384];
	ssize_t n;

	/* A blocking socket sends all of it, unless a signal or an error ends the call. */
	while ((n = smc_recv(socket, buf, sizeof(buf), 0)) > 0)
		if (smc_send(socket, buf, (size_t)n, 0) != n)
			break;
	if (n != 0)
		failed("a connection");
	smc_close(socket);
	return NULL;
}

static int serve(smc_stack *stack, const char *host, uint16_t port)
{
	struct sockaddr_in address;
	socklen_t len = sizeof(address);
	smc_socket *listener = smc_listen(stack, host, port);

	if (!listener)
		return failed("listen");
	if (smc_getsockname(listener, (struct sockaddr *)&address, &len) != 0)
		return failed("getsockname");
	printf("listening on port %u\n", ntohs(address.sin_port));
	fflush(stdout);
	for (;;) {
		smc_socket *socket = smc_accept(listener);
		pthread_t thread;

		if (!socket)
			return failed("accept");
		print_info(socket);
		fflush(stdout);
		if (pthread_create(&thread, NULL, echo, socket) != 0) {
			smc_close(socket);
			continue;
		}
		pthread_detach(thread);
	}
}

static int ask(smc_stack *stack, const char *host, uint16_t port)
{
	/* The server has to expect SMC: an ordinary one would take the handshake for data. */
	smc_socket *socket = smc_connect(stack, host, port, 10000);
	char message[MESSAGE], back[MESSAGE];
	int round;

	if (!socket)
		return failed("connect");
	print_info(socket);
	for (round = 0; round < ROUNDS; round++) {
		memset(message, round, sizeof(message));
		if (smc_send(socket, message, sizeof(message), 0) != MESSAGE)
			return failed("send");
		if (smc_recv(socket, back, sizeof(back), MSG_WAITALL) != MESSAGE)
			return failed("recv");
		if (memcmp(message, back, sizeof(back)) != 0) {
			fprintf(stderr, "echo: round %d: other bytes came back\n", round);
			return 1;
		}
	}
	printf("%d bytes came back\n", ROUNDS * MESSAGE);
	smc_close(socket);
	return 0;
}

int main(int argc, char **argv)
{
	const char *device = getenv("SMC_DEVICE");
	smc_stack *stack;
	int status = 2;

	if (argc != 4) {
		fprintf(stderr, "usage: echo server|client HOST PORT\n");
		return status;
	}
	stack = smc_stack_open(device ? device : "none", NULL);
	if (!stack)
		return failed(device ? device : "none");
	if (strcmp(argv[1], "server") == 0)
		status = serve(stack, argv[2], (uint16_t)atoi(argv[3]));
	else if (strcmp(argv[1], "client") == 0)
		status = ask(stack, argv[2], (uint16_t)atoi(argv[3]));
	smc_stack_close(stack);
	return status;
}
