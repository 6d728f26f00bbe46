// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//go:build grpc

// Calls of gRPC, by the service for health checks that comes with gRPC.
package main

import (
	"context"
	"net"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	health_v1 "google.golang.org/grpc/health/grpc_health_v1"
)

func init() {
	servers = append(servers, func(listener net.Listener) {
		server := grpc.NewServer()
		health_v1.RegisterHealthServer(server, health.NewServer())
		check(server.Serve(listener))
	})
	measures = append(measures, func(port int, duration time.Duration) {
		connection, err := grpc.Dial(at(port), grpc.WithInsecure(), grpc.WithBlock())
		check(err)
		defer connection.Close()
		client := health_v1.NewHealthClient(connection)
		call := func() (func(), func()) {
			return func() {
				_, err := client.Check(context.Background(), &health_v1.HealthCheckRequest{})
				check(err)
			}, func() {}
		}
		measure("gRPC, 1 call at a time", 1, duration, call)
		measure("gRPC, 8 calls on a connection", 8, duration, call)
	})
}
