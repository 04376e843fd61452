package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

// Produces a record to the topic t, or reads it until its last record and commits, as FaultedClient.java does.
func runFaulted(address, job string, requestTimeout time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), 120*time.Second)
	defer cancel()
	options := []kgo.Opt{
		kgo.SeedBrokers(address),
		kgo.RequestTimeoutOverhead(requestTimeout),
		kgo.RecordDeliveryTimeout(120 * time.Second),
		kgo.ProduceRequestTimeout(100 * time.Millisecond),
	}
	switch job {
	case "produce":
		options = append(options, kgo.DisableIdempotentWrite())
		fallthrough
	case "produce-idempotent":
		client, err := kgo.NewClient(append(options, kgo.DefaultProduceTopic("t"), kgo.RecordPartitioner(kgo.ManualPartitioner()))...)
		if err != nil {
			panic(err)
		}
		err = client.ProduceSync(ctx, kgo.StringRecord("new")).FirstErr()
		fmt.Println(resultOf(err, "acknowledged"))
		client.Close()
	case "consume":
		client, err := kgo.NewClient(append(options, kgo.ConsumerGroup("g"), kgo.ConsumeTopics("t"), kgo.DisableAutoCommit(),
			kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))...)
		if err != nil {
			panic(err)
		}
		var found []string
		isRead := false
		for !isRead && ctx.Err() == nil {
			client.PollFetches(ctx).EachRecord(func(record *kgo.Record) {
				found = append(found, string(record.Value))
				isRead = isRead || string(record.Value) == "c"
			})
		}
		err = client.CommitUncommittedOffsets(ctx)
		fmt.Println(resultOf(err, "committed"), strings.Join(found, ","))
		client.Close()
	default:
		panic(job)
	}
}

func resultOf(err error, done string) string {
	var refused *kerr.Error
	switch {
	case err == nil:
		return done
	case errors.As(err, &refused):
		return refused.Message
	case errors.Is(err, context.DeadlineExceeded):
		return "DeadlineExceeded"
	default:
		return strings.ReplaceAll(err.Error(), " ", "_")
	}
}
